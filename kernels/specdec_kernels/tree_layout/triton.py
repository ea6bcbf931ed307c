"""layout_trees as one Triton launch; imported only when chosen.

A program takes a block of one request's nodes and follows their parent pointers level by level. A
tree fits one block; only chains have more.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.configuration import Configuration
from specdec_kernels.tree_layout.api import WORD_BITS
from specdec_kernels.tree_layout.device import MAX_WORDS, DeviceLayout

_NUM_WARPS, _NUM_STAGES = 4, 1


# fmt: off
@triton.jit
def _slots(table_ptr, logical, mask, table_width, page_shift):
    """Physical slots of logical ones, -1 where the mask or the block table ends."""
    page = logical >> page_shift
    inside = mask & (logical >= 0) & (page < table_width)
    pages = tl.load(table_ptr + page, mask=inside, other=0).to(tl.int64)
    slots = (pages << page_shift) + (logical & ((1 << page_shift) - 1))
    return tl.where(inside, slots, -1)


@triton.jit
def _follow(parents_ptr, start, current, principal, WORDS_PAD: tl.constexpr):
    """Depths, ancestor words and private nodes; every step goes to an earlier node, so it ends."""
    count = tl.zeros_like(current)
    private = tl.zeros_like(current)
    word = tl.arange(0, WORDS_PAD)
    words = tl.zeros([current.shape[0], WORDS_PAD], tl.int64)
    while tl.max(current, 0) >= 0:
        on = current >= 0
        count += on.to(tl.int32)
        private += (on & (current >= principal)).to(tl.int32)
        bit = tl.full([1], 1, tl.int64) << (current & 63).to(tl.int64)
        hit = on[:, None] & ((current >> 6)[:, None] == word[None, :])
        words |= tl.where(hit, bit[:, None], 0)
        current = tl.load(parents_ptr + start + current, mask=on, other=-1)
    return tl.maximum(count - 1, 0), words, tl.max(private, 0)


@triton.jit
def layout_kernel(
    parents_ptr, cu_nodes_ptr, committed_ptr, tables_ptr, is_chain_ptr,
    depths_ptr, ancestors_ptr, positions_ptr, slots_ptr, lanes_ptr, private_ptr,
    num_rows, table_width, page_shift,
    NUM_WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, NUM_LANES: tl.constexpr,
    HAS_CHAINS: tl.constexpr,
):
    BLOCK: tl.constexpr = WORDS_PAD * 64
    request = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    start = tl.minimum(tl.maximum(tl.load(cu_nodes_ptr + request), 0), num_rows)
    end = tl.minimum(tl.load(cu_nodes_ptr + request + 1), num_rows)
    num_nodes = tl.maximum(end - start, 0)
    if (first > 0) & (first >= num_nodes):
        return
    committed = tl.load(committed_ptr + request)
    table_ptr = tables_ptr + request * table_width
    node = first + tl.arange(0, BLOCK)
    valid = node < num_nodes
    above = tl.load(parents_ptr + start + node, mask=valid, other=-1)
    chain = False
    if HAS_CHAINS:
        chain = tl.load(is_chain_ptr + request) != 0

    fits = tl.where(node == 0, above == -1, (above >= 0) & (above < node))
    wrong = tl.max((valid & ~fits).to(tl.int32), 0) > 0
    tree = ~((num_nodes > NUM_WORDS * 64) | wrong | chain)
    current = tl.where(valid, node, -1)
    # Nodes 0, 1, .. are stored where they would be committed as long as each is the child of the
    # one before; all other nodes are private.
    off = valid & (node > 0) & (above != node - 1)
    principal = tl.min(tl.where(off, node, BLOCK), 0)
    depth, words, private = _follow(
        parents_ptr, start, tl.where(tree, current, -1), principal, WORDS_PAD
    )
    word = tl.arange(0, WORDS_PAD)
    if not tree:
        depth = tl.where(chain, node, 0)
        own = valid[:, None] & ((node >> 6)[:, None] == word[None, :])
        bit = tl.full([1], 1, tl.int64) << (node & 63).to(tl.int64)
        words = tl.where(own & (not chain), bit[:, None], 0)
        private = tl.where(chain, 0, -1)
    if first == 0:
        tl.store(private_ptr + request, private)

    row = (start + node).to(tl.int64)
    position = committed + depth
    tl.store(depths_ptr + row, depth, mask=valid)
    tl.store(positions_ptr + row, position.to(tl.int64), mask=valid)
    words_mask = valid[:, None] & (word < NUM_WORDS)[None, :]
    tl.store(ancestors_ptr + row[:, None] * NUM_WORDS + word[None, :], words, mask=words_mask)
    slot = _slots(table_ptr, committed + node, valid, table_width, page_shift)
    tl.store(slots_ptr + row, slot, mask=valid)
    for lane in range(NUM_LANES):
        on = current >= 0
        logical = tl.where(on, committed + current, position - lane)
        slot = _slots(table_ptr, logical, valid, table_width, page_shift)
        tl.store(lanes_ptr + row * NUM_LANES + lane, slot.to(tl.int32), mask=valid)
        above = tl.load(parents_ptr + start + current, mask=on, other=-1)
        # In a chain position P - lane is stored at slot P - lane, committed or not.
        current = tl.where(tree, above, -1)
# fmt: on


def constants(num_words: int, num_lanes: int, has_chains: bool) -> dict[str, Any]:
    """What a launch of these sizes fixes at compile time."""
    return {
        "NUM_WORDS": num_words,
        "WORDS_PAD": triton.next_power_of_2(num_words),
        "NUM_LANES": num_lanes,
        "HAS_CHAINS": has_chains,
    }


def configurations() -> list[Configuration]:
    """Every shipped form: 16 lanes, with and without chains."""
    ints = ("parents", "cu_nodes", "committed", "tables", "depths", "lanes", "private")
    signature = {f"{name}_ptr": "*i32" for name in ints}
    signature |= {f"{name}_ptr": "*i64" for name in ("ancestors", "positions", "slots")}
    signature |= dict.fromkeys(("num_rows", "table_width", "page_shift"), "i32")
    return [
        Configuration(
            name=f"tree_layout/layout/w{num_words}{'-chains' if has_chains else ''}",
            kernel=layout_kernel,
            signature=signature | {"is_chain_ptr": "*i1" if has_chains else "*i32"},
            constants=constants(num_words, 16, has_chains),
            num_warps=_NUM_WARPS,
            num_stages=_NUM_STAGES,
            needs_matrix=False,
        )
        for num_words in range(1, MAX_WORDS + 1)
        for has_chains in (False, True)
    ]


def triton_layout(
    parents: Tensor,
    cu_nodes: Tensor,
    committed_lens: Tensor,
    block_tables: Tensor,
    page_size: int,
    num_words: int,
    num_lanes: int,
    is_chain: Tensor | None,
) -> DeviceLayout:
    """As `layout_trees`, without its checks."""
    rows, requests = parents.shape[0], committed_lens.shape[0]

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=parents.device)

    layout = DeviceLayout(
        depths=empty(torch.int32, rows),
        ancestors=empty(torch.int64, rows, num_words),
        positions=empty(torch.int64, rows),
        slots=empty(torch.int64, rows),
        lane_slots=empty(torch.int32, rows, num_lanes),
        private_nodes=empty(torch.int32, requests),
    )
    fixed = constants(num_words, num_lanes, is_chain is not None)
    # A request may hold all rows, and only the device knows.
    blocks = max(1, triton.cdiv(rows, fixed["WORDS_PAD"] * WORD_BITS))
    if requests:
        layout_kernel[(requests, blocks)](
            parents, cu_nodes, committed_lens, block_tables,
            parents if is_chain is None else is_chain, *layout,
            rows, block_tables.shape[1], page_size.bit_length() - 1,
            num_warps=_NUM_WARPS, num_stages=_NUM_STAGES, **fixed,
        )  # fmt: skip
    return layout
