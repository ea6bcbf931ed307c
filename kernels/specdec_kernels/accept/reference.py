"""The meaning of accept: the walk, node by node, in plain Python."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from specdec_kernels.accept.base import Accepted
from specdec_kernels.batch import TreeBatch


def reference_accept(
    batch: TreeBatch, token_ids: Tensor, chosen: Tensor, max_depth: int
) -> Accepted:
    """As `accept`, without its checks; results are made on the CPU and moved."""
    parents, carried, law = batch.parents.tolist(), token_ids.tolist(), chosen.tolist()
    counts: list[int] = []
    paths: list[list[int]] = []
    emitted: list[list[int]] = []
    for start, end in pairwise(batch.cu_nodes_host):
        path = _walk(parents[start:end], carried[start:end], law[start:end], max_depth)
        missing = [-1] * (max_depth + 1 - len(path))
        counts.append(max(len(path) - 1, 0))
        paths.append(path + missing)
        emitted.append([law[start + node] for node in path] + missing)

    shape = (batch.num_requests, max_depth + 1)
    return Accepted(
        torch.tensor(counts, dtype=torch.int32).to(batch.device),
        torch.tensor(paths, dtype=torch.int32).view(shape).to(batch.device),
        torch.tensor(emitted, dtype=torch.int64).view(shape).to(batch.device),
    )


def _walk(parents: list[int], carried: list[int], law: list[int], max_depth: int) -> list[int]:
    """The root and the accepted nodes in order; nothing if there is no root."""
    children = {(parents[node], carried[node]): node for node in range(1, len(parents))}
    path: list[int] = []
    node = 0 if parents else None
    while node is not None:
        path.append(node)
        follows = len(path) <= max_depth and law[node] >= 0
        node = children.get((node, law[node])) if follows else None
    return path
