"""The work list of a step, made on the device: blocks of rows, their parts, items of work.

Three small kernels read prefix sums, lengths and depths, so that neither the host nor a captured
graph needs to know them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specdec_kernels.tree_attention.triton_kernels import ITEM_FIELDS

CHUNK = 128
"""Elements that a program looks at in one go; fixed, so that lengths compile nothing anew."""

HAS_LOCAL = tl.constexpr(1)
"""Flag of a block whose rows have a local part."""
MUST_SPLIT = tl.constexpr(2)
"""Flag of a block whose rows have earlier parts in another block."""


# fmt: off
@triton.jit(do_not_specialize=("max_requests", "max_rows", "rows_per_block"))
def blocks_kernel(
    cu_nodes_ptr, committed_ptr, depths_ptr, is_chain_ptr, shared_parts_ptr, num_shared_ptr,
    positions_ptr, limits_ptr, row_blocks_ptr, row_lanes_ptr,
    block_requests_ptr, block_rows_ptr, block_lows_ptr, block_limits_ptr, block_skips_ptr,
    block_flags_ptr, num_blocks_ptr, max_requests, max_rows, rows_per_block,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):
    """Program (r, i): blocks i, i + programs, .. of request r; r = max_requests: rows of nobody."""
    request = tl.program_id(0)
    is_real = request < max_requests
    start = tl.load(cu_nodes_ptr + request)
    num_rows = tl.load(cu_nodes_ptr + request + 1, mask=is_real, other=max_rows) - start
    num_blocks = (num_rows + rows_per_block - 1) // rows_per_block

    # The private blocks follow the shared ones, request by request.
    base = tl.load(num_shared_ptr)
    index = tl.arange(0, CHUNK)
    for first in range(0, request, CHUNK):
        earlier = first + index < request
        begins = tl.load(cu_nodes_ptr + first + index, mask=earlier, other=0)
        ends = tl.load(cu_nodes_ptr + first + index + 1, mask=earlier, other=0)
        base += tl.sum((ends - begins + rows_per_block - 1) // rows_per_block, 0)
    if is_real == 0:
        tl.store(num_blocks_ptr, base)

    committed = tl.load(committed_ptr + request, mask=is_real, other=0)
    is_chain = tl.load(is_chain_ptr + request, mask=is_real, other=0) != 0
    skip = tl.load(shared_parts_ptr + request, mask=is_real, other=0)
    lane = tl.arange(0, BLOCK_M)
    for number in range(tl.program_id(1), num_blocks, tl.num_programs(1)):
        node = number * rows_per_block + lane
        valid = (lane < rows_per_block) & (node < num_rows)
        row = start + node
        block = base + number
        if is_real:
            position = committed + tl.load(depths_ptr + row, mask=valid, other=0)
            limit = tl.where(is_chain, position, committed - 1)
            if LANES > 0:
                limit = position - LANES
            tl.store(positions_ptr + row, position, mask=valid)
            tl.store(limits_ptr + row, limit, mask=valid)
            tl.store(row_lanes_ptr + row, lane, mask=valid)
            tl.store(block_rows_ptr + block * rows_per_block + lane, tl.where(valid, row, -1),
                     mask=lane < rows_per_block)
            tl.store(block_requests_ptr + block, request)
            tl.store(block_lows_ptr + block, tl.min(tl.where(valid, position, 2147483647), 0))
            tl.store(block_limits_ptr + block, tl.max(tl.where(valid, limit, -1), 0))
            tl.store(block_skips_ptr + block, skip)
            has_local = (LANES > 0) | (is_chain == 0)
            flags = tl.where(has_local, HAS_LOCAL, 0) + tl.where(skip > 0, MUST_SPLIT, 0)
            tl.store(block_flags_ptr + block, flags)
        tl.store(row_blocks_ptr + row, tl.where(is_real, block, -1), mask=valid)


@triton.jit
def _parts_of(
    block, valid, block_lows_ptr, block_limits_ptr, block_skips_ptr, block_flags_ptr, window,
    SPLIT: tl.constexpr,
):
    """First part, number of parts before the local one, has local, must split."""
    low = tl.load(block_lows_ptr + block, mask=valid, other=0)
    limit = tl.load(block_limits_ptr + block, mask=valid, other=-1)
    skip = tl.load(block_skips_ptr + block, mask=valid, other=0)
    flags = tl.load(block_flags_ptr + block, mask=valid, other=0)
    first = tl.maximum(skip, tl.maximum(low - window + 1, 0) // SPLIT)
    context = tl.maximum((limit + SPLIT) // SPLIT - first, 0)
    return first, context, flags & HAS_LOCAL, (flags & MUST_SPLIT) != 0


@triton.jit(do_not_specialize=("window", "kv_heads", "num_programs", "max_places"))
def split_kernel(
    num_blocks_ptr, block_lows_ptr, block_limits_ptr, block_skips_ptr, block_flags_ptr,
    block_firsts_ptr, block_parts_ptr, block_places_ptr, block_items_ptr, num_items_ptr,
    window, kv_heads, num_programs, max_places, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
):
    """One program. A block is split if it has more parts than an equal share of all of them.

    Where scratch cannot hold all such blocks, the first ones that fit it are split.
    """
    num_blocks = tl.load(num_blocks_ptr)
    index = tl.arange(0, CHUNK)
    total = 0
    forced_places = 0
    for first_block in range(0, num_blocks, CHUNK):
        block = first_block + index
        valid = block < num_blocks
        first, context, local, forced = _parts_of(
            block, valid, block_lows_ptr, block_limits_ptr, block_skips_ptr, block_flags_ptr,
            window, SPLIT,
        )
        parts = tl.where(valid, context + local, 0)
        tl.store(block_firsts_ptr + block, first, mask=valid)
        tl.store(block_parts_ptr + block, parts, mask=valid)
        total += tl.sum(parts, 0)
        forced_places += tl.sum(tl.where(forced, parts, 0), 0)

    share = tl.maximum((total * kv_heads + num_programs - 1) // num_programs, 1)
    forced_place = 0
    place = forced_places
    item = 0
    for first_block in range(0, num_blocks, CHUNK):
        block = first_block + index
        valid = block < num_blocks
        flags = tl.load(block_flags_ptr + block, mask=valid, other=0)
        forced = (flags & MUST_SPLIT) != 0
        parts = tl.load(block_parts_ptr + block, mask=valid, other=0)
        too_long = forced_places + parts > max_places
        wanted = tl.where(forced | too_long | (parts <= share), 0, parts)
        forced_parts = tl.where(forced, parts, 0)
        places = tl.where(
            forced, forced_place + tl.cumsum(forced_parts, 0) - forced_parts,
            place + tl.cumsum(wanted, 0) - wanted,
        )
        split = forced | ((wanted > 0) & (places + parts <= max_places))
        items = tl.where(split, parts, tl.where(valid, 1, 0))
        tl.store(block_places_ptr + block, tl.where(split, places, -1), mask=valid)
        tl.store(block_items_ptr + block, item + tl.cumsum(items, 0) - items, mask=valid)
        forced_place += tl.sum(forced_parts, 0)
        place += tl.sum(wanted, 0)
        item += tl.sum(items, 0)
    tl.store(num_items_ptr, item)


@triton.jit
def items_kernel(
    num_blocks_ptr, block_flags_ptr, block_firsts_ptr, block_parts_ptr, block_places_ptr,
    block_items_ptr, items_ptr, CHUNK: tl.constexpr,
):
    """Programs write the items of block i, i + programs, ..."""
    index = tl.arange(0, CHUNK)
    for block in range(tl.program_id(0), tl.load(num_blocks_ptr), tl.num_programs(0)):
        local = tl.load(block_flags_ptr + block) & HAS_LOCAL
        first = tl.load(block_firsts_ptr + block)
        parts = tl.load(block_parts_ptr + block)
        place = tl.load(block_places_ptr + block)
        context = parts - local
        num_items = tl.where(place < 0, 1, parts)
        for begin in range(0, num_items, CHUNK):
            part = begin + index
            is_local = part == context
            split_first = tl.where(is_local, 0, first + part)
            split_end = tl.where(is_local, 0, first + part + 1)
            item_ptr = items_ptr + (tl.load(block_items_ptr + block) + part) * ITEM_FIELDS
            mask = part < num_items
            whole = place < 0
            tl.store(item_ptr, tl.zeros_like(part) + block, mask=mask)
            tl.store(item_ptr + 1, tl.where(whole, first, split_first), mask=mask)
            tl.store(item_ptr + 2, tl.where(whole, first + context, split_end), mask=mask)
            tl.store(item_ptr + 3, tl.where(whole, local, is_local.to(tl.int32)), mask=mask)
            tl.store(item_ptr + 4, tl.where(whole, -1, place + part), mask=mask)
# fmt: on
