"""Tree attention as two Triton kernels: attention over items of work, and the fold of the parts.

The keys that rows see are cut in parts: slots at absolute multiples of SPLIT, then the local part,
which is the tree's own nodes (fast) or the nearest LANES positions, row by row (exact). Each part
starts from nothing, and the parts of a row are folded in ascending order, the local one last. An
item of work is a block of rows with a range of parts. It folds all of them, or it holds one part of
a block and leaves the fold to `merge_kernel`: the same operations in the same order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.tree_attention.triton_tiles import (
    accumulate,
    accumulate_lane,
    dot,
    empty_state,
    finish,
    fold,
    load_scales,
    load_sinks,
    load_tile,
    locate,
    split_slots,
    to_numbers,
    to_scores,
)

RUNTIME_INTEGERS = (
    "window", "kv_heads", "groups", "rows_per_block", "page_shift", "table_width", "num_words",
    "q_row", "q_head", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head",
    "out_row", "out_head", "num_heads",
)  # fmt: skip
ITEM_FIELDS = tl.constexpr(5)
"""Block, first part, end of the parts, whether the local part belongs to it, place in the scratch
or -1."""


# fmt: off
@triton.jit
def _load_kv(kv, pages, offsets, valid, dims, kv_head,
             D: tl.constexpr, D_PAD: tl.constexpr, VEC: tl.constexpr):
    k = load_tile(kv[0], pages, offsets, valid, dims, kv[6], kv[7], kv_head * kv[8], D, D_PAD, VEC)
    v = load_tile(kv[1], pages, offsets, valid, dims, kv[9], kv[10], kv_head * kv[11],
                  D, D_PAD, VEC)
    return k, v


@triton.jit
def _tile_update(
    q, kv, table_ptr, slots, valid, seen, dims, state, scale, softcap, kv_head,
    D: tl.constexpr, D_PAD: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CACHE: tl.constexpr, WIDEN: tl.constexpr, VEC: tl.constexpr,
):
    pages, offsets = locate(table_ptr, slots, valid, kv[4])
    k, v = _load_kv(kv, pages, offsets, valid, dims, kv_head, D, D_PAD, VEC)
    s = dot(q, tl.trans(to_numbers(k, q.dtype, CACHE)), WIDEN)
    v_scales = scale
    if CACHE != 0:
        k_scales = load_scales(kv[2], pages, offsets, valid, kv[4], kv[5], kv_head)
        v_scales = load_scales(kv[3], pages, offsets, valid, kv[4], kv[5], kv_head)
        s = s * (k_scales * scale)[None, :]
    else:
        s = s * scale
    s = to_scores(s, softcap, HAS_SOFTCAP)
    v = to_numbers(v, q.dtype, CACHE)
    return accumulate(s, seen, v, v_scales, state, q.dtype, CACHE, WIDEN)


@triton.jit
def _lane_update(
    q, kv, slots, dims, state, scale, softcap, kv_head,
    D: tl.constexpr, D_PAD: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CACHE: tl.constexpr, VEC: tl.constexpr,
):
    valid = slots >= 0
    pages, offsets = split_slots(slots, kv[4])
    k, v = _load_kv(kv, pages, offsets, valid, dims, kv_head, D, D_PAD, VEC)
    s = tl.sum(q.to(tl.float32) * to_numbers(k, tl.float32, CACHE), 1) * scale
    v = to_numbers(v, tl.float32, CACHE)
    if CACHE != 0:
        s = s * load_scales(kv[2], pages, offsets, valid, kv[4], kv[5], kv_head)
        v = v * load_scales(kv[3], pages, offsets, valid, kv[4], kv[5], kv_head)[:, None]
    s = tl.where(valid, to_scores(s, softcap, HAS_SOFTCAP), float("-inf"))
    return accumulate_lane(s, v, state)


@triton.jit
def _seen_by(rows, base, slots, nodes, valid, is_local, start, window,
             HAS_WINDOW: tl.constexpr, TREES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which keys of a tile the rows see: [BLOCK_M, BLOCK_N]."""
    row, lane_valid, position, limit, positions_ptr, words_ptr, num_words = rows
    at = slots
    if TREES:
        # Among a tree's own nodes, bit words say what is seen; before them, the slots do.
        limit = tl.where(is_local != 0, 2147483647, limit)
        # Products with a scalar condition: the interpreter cannot mask with `vector & scalar`.
        ours = tl.where(lane_valid, is_local, 0) != 0
        word_at = words_ptr + row * num_words + base // 32
        word = tl.load(word_at, mask=ours, other=-1)[:, None]
        if BLOCK_N == 64:
            high = tl.load(word_at + 1, mask=ours, other=-1)[:, None]
            word = tl.where((tl.arange(0, BLOCK_N) < 32)[None, :], word, high)
        bit = (word >> (nodes % 32)[None, :]) & 1
        seen = (slots[None, :] <= limit[:, None]) & (bit == 1)
        if HAS_WINDOW:
            theirs = tl.where(valid, is_local, 0) != 0
            at = tl.load(positions_ptr + start + nodes, mask=theirs, other=0)
            at = tl.where(is_local != 0, at, slots)
    else:
        seen = slots[None, :] <= limit[:, None]
    if HAS_WINDOW:
        seen = seen & (at[None, :] > (position - window)[:, None])
    # A last tile may reach into bit words of nodes that the block does not load.
    return seen & valid[None, :]


@triton.jit
def _fold_parts(
    q, kv, table_ptr, rows, start, first, end, has_local, dims, state, scale, softcap, window,
    kv_head, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    TREES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CACHE: tl.constexpr, WIDEN: tl.constexpr, VEC: tl.constexpr,
):
    """Parts first .. end - 1 and, in the fast layout, the tree's own nodes as part `end`."""
    row, _, position, limit, _, _, _ = rows
    end_slot = tl.max(limit, 0) + 1
    first_slot = 0
    if HAS_WINDOW:
        first_slot = tl.maximum(tl.min(position, 0) - window + 1, 0) // BLOCK_N * BLOCK_N
    # Parents come before children: no row sees a node after the block's last one.
    end_node = (tl.max(row, 0) + 1 - start).to(tl.int32)
    if not TREES:
        has_local = 0
    for part in range(first, end + has_local):
        part_state = empty_state(state)
        is_local = (part == end).to(tl.int32)
        low = tl.maximum(part * SPLIT, first_slot)
        high = tl.minimum(part * SPLIT + SPLIT, end_slot)
        # Nodes stand behind the L committed slots: limit is L - 1 in all rows of a tree.
        before = is_local * end_slot
        low = tl.where(is_local != 0, 0, low)
        high = tl.where(is_local != 0, end_node, high)
        for base in range(low, high, BLOCK_N):
            nodes = base + tl.arange(0, BLOCK_N)
            valid = nodes < high
            slots = before + nodes
            seen = _seen_by(rows, base, slots, nodes, valid, is_local, start, window,
                            HAS_WINDOW, TREES, BLOCK_N)
            part_state = _tile_update(
                q, kv, table_ptr, slots, valid, seen, dims, part_state, scale, softcap, kv_head,
                D, D_PAD, HAS_SOFTCAP, CACHE, WIDEN, VEC,
            )
        state = fold(state, part_state)
    return state


@triton.jit
def _fold_lanes(
    q, kv, rows, lane_slots_ptr, has_local, dims, state, scale, softcap, window, kv_head,
    D: tl.constexpr, D_PAD: tl.constexpr, LANES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, CACHE: tl.constexpr, VEC: tl.constexpr,
):
    """The nearest LANES positions, row by row, nearest first."""
    row, lane_valid, _, _, _, _, _ = rows
    num_near = LANES
    if HAS_WINDOW:
        num_near = tl.minimum(window, LANES)
    part_state = empty_state(state)
    for near in range(0, has_local * num_near):
        slots = tl.load(lane_slots_ptr + row * LANES + near, mask=lane_valid, other=-1)
        part_state = _lane_update(
            q, kv, slots, dims, part_state, scale, softcap, kv_head,
            D, D_PAD, HAS_SOFTCAP, CACHE, VEC,
        )
    return fold(state, part_state)


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, out_ptr,
    part_max_ptr, part_sum_ptr, part_acc_ptr,
    items_ptr, num_items_ptr, block_requests_ptr, block_rows_ptr,
    positions_ptr, limits_ptr, cu_nodes_ptr, tables_ptr, words_ptr, lane_slots_ptr,
    scale, softcap, window, kv_heads, groups, rows_per_block, page_shift, table_width, num_words,
    q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_row, out_head,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, LANES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    CACHE: tl.constexpr, WIDEN: tl.constexpr, VEC: tl.constexpr,
):
    kv = (k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, page_shift, kv_heads,
          k_page, k_slot, k_head, v_page, v_slot, v_head)
    dims = tl.arange(0, D_PAD)
    lane = tl.arange(0, BLOCK_M)
    num_work = tl.load(num_items_ptr) * kv_heads
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item_ptr = items_ptr + (work // kv_heads) * ITEM_FIELDS
        kv_head = tl.cast(work % kv_heads, tl.int64)
        block = tl.load(item_ptr)
        request = tl.load(block_requests_ptr + block)
        row = tl.load(
            block_rows_ptr + block * rows_per_block + lane // groups,
            mask=lane < rows_per_block * groups, other=-1,
        ).to(tl.int64)
        lane_valid = row >= 0
        position = tl.load(positions_ptr + row, mask=lane_valid, other=2147483647)
        limit = tl.load(limits_ptr + row, mask=lane_valid, other=-1)
        rows = (row, lane_valid, position, limit, positions_ptr, words_ptr, num_words)
        head = kv_head * groups + lane % groups
        q_mask = lane_valid[:, None] & (dims < D)[None, :]
        q_at = tl.multiple_of(row * q_row + head * q_head, VEC)
        q = tl.load(q_ptr + (q_at[:, None] + dims[None, :]), mask=q_mask, other=0.0)

        state = (tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                 tl.zeros([BLOCK_M, D_PAD], tl.float32))
        has_local = tl.load(item_ptr + 3)
        state = _fold_parts(
            q, kv, tables_ptr + request.to(tl.int64) * table_width, rows,
            tl.load(cu_nodes_ptr + request), tl.load(item_ptr + 1), tl.load(item_ptr + 2),
            has_local, dims, state, scale, softcap, window, kv_head, D, D_PAD, BLOCK_N, SPLIT,
            LANES == 0, HAS_WINDOW, HAS_SOFTCAP, CACHE, WIDEN, VEC,
        )
        if LANES > 0:
            state = _fold_lanes(
                q, kv, rows, lane_slots_ptr, has_local, dims, state, scale, softcap, window,
                kv_head, D, D_PAD, LANES, HAS_WINDOW, HAS_SOFTCAP, CACHE, VEC,
            )

        place = tl.load(item_ptr + 4)
        if place < 0:
            sinks = load_sinks(sinks_ptr, head, lane_valid, HAS_SINKS)
            out_at = tl.multiple_of(row * out_row + head * out_head, VEC)
            result = finish(state, sinks).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (out_at[:, None] + dims[None, :]), result, mask=q_mask)
        else:
            at = (place * kv_heads + kv_head) * BLOCK_M + lane
            tl.store(part_max_ptr + at, state[0], mask=lane_valid)
            tl.store(part_sum_ptr + at, state[1], mask=lane_valid)
            tl.store(part_acc_ptr + (at[:, None] * D + dims[None, :]), state[2], mask=q_mask)


@triton.jit
def _fold_places(
    parts, place, num_parts, lane, kv_heads, kv_head, valid, dims, state,
    D: tl.constexpr, BLOCK_M: tl.constexpr,
):
    part_max_ptr, part_sum_ptr, part_acc_ptr = parts
    for part in range(0, num_parts):
        at = ((place + part) * kv_heads + kv_head) * BLOCK_M + lane
        part_state = (
            tl.load(part_max_ptr + at, mask=valid, other=float("-inf")),
            tl.load(part_sum_ptr + at, mask=valid, other=0.0),
            tl.load(
                part_acc_ptr + (at[:, None] * D + dims[None, :]),
                mask=valid[:, None] & (dims < D)[None, :], other=0.0,
            ),
        )
        state = fold(state, part_state)
    return state


@triton.jit(do_not_specialize=RUNTIME_INTEGERS)
def merge_kernel(
    part_max_ptr, part_sum_ptr, part_acc_ptr, sinks_ptr, out_ptr,
    row_blocks_ptr, row_lanes_ptr, shared_blocks_ptr, shared_lanes_ptr,
    block_places_ptr, block_parts_ptr,
    num_heads, kv_heads, groups, out_row, out_head,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr, VEC: tl.constexpr,
):
    """Program (row, i): HEADS heads of a row whose block was split; no others do anything."""
    parts = (part_max_ptr, part_sum_ptr, part_acc_ptr)
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(row_blocks_ptr + row)
    place = tl.load(block_places_ptr + block, mask=block >= 0, other=-1)
    if place >= 0:
        dims = tl.arange(0, D_PAD)
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        valid = head < num_heads
        kv_head = (head // groups).to(tl.int64)
        state = (tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32),
                 tl.zeros([HEADS, D_PAD], tl.float32))
        # Parts that requests share come first, in ascending order like all others.
        shared = tl.load(shared_blocks_ptr + row)
        state = _fold_places(
            parts, tl.load(block_places_ptr + shared, mask=shared >= 0, other=0),
            tl.load(block_parts_ptr + shared, mask=shared >= 0, other=0),
            tl.load(shared_lanes_ptr + row) * groups + head % groups,
            kv_heads, kv_head, valid, dims, state, D, BLOCK_M,
        )
        state = _fold_places(
            parts, place, tl.load(block_parts_ptr + block),
            tl.load(row_lanes_ptr + row) * groups + head % groups,
            kv_heads, kv_head, valid, dims, state, D, BLOCK_M,
        )
        out_at = tl.multiple_of(row * out_row + head * out_head, VEC)
        sinks = load_sinks(sinks_ptr, head, valid, HAS_SINKS)
        tl.store(
            out_ptr + (out_at[:, None] + dims[None, :]),
            finish(state, sinks).to(out_ptr.dtype.element_ty),
            mask=valid[:, None] & (dims < D)[None, :],
        )
# fmt: on
