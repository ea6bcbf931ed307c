"""The meaning of layout_trees: the description of a step that `TreeBatch` makes on the host."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_layout.api import WORD_BITS
from specdec_kernels.tree_layout.device import DeviceLayout


def reference_layout(
    parents: Tensor,
    cu_nodes: Tensor,
    committed_lens: Tensor,
    block_tables: Tensor,
    page_size: int,
    num_words: int,
    num_lanes: int,
    is_chain: Tensor | None,
) -> DeviceLayout:
    """As `layout_trees`; raises ValueError also for what a device could not report."""
    ends = cu_nodes.tolist()
    if ends[0] != 0 or ends[-1] != parents.shape[0] or sorted(ends) != ends:
        raise ValueError(
            f"cu_nodes: must rise from 0 to {parents.shape[0]}, the number of parents, got {ends}"
        )
    flat = parents.tolist()
    chains = [False] * (len(ends) - 1) if is_chain is None else is_chain.tolist()
    trees: list[list[int] | int] = []
    for request, ((start, end), chain) in enumerate(zip(pairwise(ends), chains, strict=True)):
        if not chain and end - start > num_words * WORD_BITS:
            raise ValueError(
                f"num_words: request {request} has a tree of {end - start} nodes, {num_words} "
                f"words hold {num_words * WORD_BITS}"
            )
        trees.append(end - start if chain or start == end else flat[start:end])
    tables = block_tables.tolist()
    batch = TreeBatch.from_lists(trees, committed_lens.tolist(), tables, page_size, parents.device)
    return DeviceLayout(
        depths=batch.depths,
        ancestors=pad(batch.ancestors, (0, num_words - batch.ancestors.shape[1])),
        positions=batch.positions,
        slots=batch.slots,
        lane_slots=batch.lane_slots(num_lanes),
        private_nodes=torch.tensor(
            batch.private_nodes_host, dtype=torch.int32, device=parents.device
        ),
    )
