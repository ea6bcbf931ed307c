"""The meaning of compact_kv, copy_pages and compact_paths, in plain torch; also the CPU form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch


def by_slot(cache: Tensor) -> Tensor:
    """A stack [num_groups, num_pages, page_size, ...] as [num_groups, num_slots, ...]."""
    return cache.view(cache.shape[0], cache.shape[1] * cache.shape[2], *cache.shape[3:])


def reference_move(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copies entries `src` of dimension 1 to `dst` in every cache; all reads precede all writes."""
    for cache in caches:
        # Bytes, because torch has no index_copy_ for fp8.
        data = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
        data.index_copy_(1, dst, data.index_select(1, src))


def reference_compact_paths(
    caches: Sequence[Tensor], batch: TreeBatch, paths: Tensor, num_nodes: Tensor
) -> None:
    """As `compact_paths`, without checks; waits for the device to learn how much moves."""
    place = torch.arange(paths.shape[1], device=paths.device)
    rows = batch.cu_nodes[1:] - batch.cu_nodes[:-1]
    moving = (place < num_nodes.unsqueeze(1)) & (paths > place) & (paths < rows.unsqueeze(1))
    requests, targets = moving.nonzero(as_tuple=True)
    if not len(requests):
        return
    src = _physical(batch, requests, paths[requests, targets])
    dst = _physical(batch, requests, targets)
    reference_move([by_slot(cache) for cache in caches], src, dst)


def _physical(batch: TreeBatch, requests: Tensor, nodes: Tensor) -> Tensor:
    logical = batch.committed_lens[requests].long() + nodes
    pages = batch.block_tables[requests, logical // batch.page_size].long()
    return pages * batch.page_size + logical % batch.page_size
