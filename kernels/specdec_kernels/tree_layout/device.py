"""Layouts of trees that lie on a device: validation and choice of form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.dispatch import Impl, choose
from specdec_kernels.tree_layout.api import MAX_TREE_NODES, WORD_BITS

MAX_WORDS = MAX_TREE_NODES // WORD_BITS


class DeviceLayout(NamedTuple):
    """Where every row stands and what it may see; the fields of `TreeBatch` of the same names.

    depths: int32 [S]. ancestors: int64 [S, num_words] used as unsigned words. positions: int64 [S],
    L + depth. slots: int64 [S], the physical slot of each row. lane_slots: int32 [S, num_lanes],
    the physical slot of what the row sees at position P - lane, -1 where there is none.
    private_nodes: int32 [R], the most nodes of one path that are not stored where they would be
    committed, 0 for chains, -1 for a request whose parents are no tree.
    """

    depths: Tensor
    ancestors: Tensor
    positions: Tensor
    slots: Tensor
    lane_slots: Tensor
    private_nodes: Tensor


def layout_trees(
    parents: Tensor,
    cu_nodes: Tensor,
    committed_lens: Tensor,
    block_tables: Tensor,
    page_size: int,
    num_words: int,
    num_lanes: int = 16,
    *,
    is_chain: Tensor | None = None,
    impl: Impl = "auto",
) -> DeviceLayout:
    """Turns parent indices into depths, ancestor words, positions, slots and lane slots.

    parents: int32 [S], indices within the request; a request's first node has -1, every other an
    earlier node. cu_nodes: int32 [R + 1], prefix sums of rows per request. committed_lens: int32
    [R]. block_tables: int32 [R, P], pages enough for L + rows slots. page_size: a power of two.
    num_words: 64-bit words per ancestor set, 1..4; a tree has at most 64 * num_words nodes.
    is_chain: bool [R] or None for no chains; rows of a chain follow each other whatever their
    parents say, may be any number, and have ancestor words 0. All tensors contiguous, on one
    device; none is changed. impl: see `specdec_kernels.dispatch.choose`.

    Raises ValueError naming the argument if shapes, dtypes or devices disagree or a number is out
    of range. A malformed tree raises ValueError naming request and node in the "reference" form,
    which waits for the device. The "triton" form never waits and cannot raise: such a request has
    -1 in `private_nodes`, and each of its rows has depth 0 and sees the committed tokens and itself
    alone. There, a slot whose page the block table has no room for is -1.
    """
    _check_sizes(page_size, num_words, num_lanes)
    requests = committed_lens.shape[0] if committed_lens.dim() else 0
    chains = [] if is_chain is None else [("is_chain", is_chain, torch.bool, (requests,))]
    for name, tensor, dtype, shape in (
        ("parents", parents, torch.int32, (parents.numel(),)),
        ("cu_nodes", cu_nodes, torch.int32, (requests + 1,)),
        ("committed_lens", committed_lens, torch.int32, (requests,)),
        ("block_tables", block_tables, torch.int32, (requests, *block_tables.shape[-1:])),
        *chains,
    ):
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(
                f"{name}: must be {dtype} {list(shape)}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if not tensor.is_contiguous() or tensor.device != parents.device:
            raise ValueError(f"{name}: must be contiguous and on the device of parents")
    layout: DeviceLayout = choose("layout_trees", impl, parents.device)(
        parents, cu_nodes, committed_lens, block_tables, page_size, num_words, num_lanes, is_chain
    )
    return layout


def _check_sizes(page_size: int, num_words: int, num_lanes: int) -> None:
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size: must be a power of two, got {page_size}")
    if not 1 <= num_words <= MAX_WORDS:
        raise ValueError(f"num_words: must lie in 1..{MAX_WORDS}, got {num_words}")
    if num_lanes < 1:
        raise ValueError(f"num_lanes: must be at least 1, got {num_lanes}")
