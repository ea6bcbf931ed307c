"""Entry points of compact_kv, copy_pages and compact_paths: validation and choice of form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.compact_kv.reference import by_slot
from specdec_kernels.dispatch import Impl, choose


def compact_kv(
    caches: Sequence[Tensor], src_slots: Tensor, dst_slots: Tensor, *, impl: Impl = "auto"
) -> None:
    """Moves the KV of an accepted path to where its tokens belong.

    caches: tensors [num_groups, num_pages, page_size, Hkv, D], or without D for the scales of a
    quantised cache, of any dtypes, contiguous, all layers' keys or values stacked in front; changed
    in place. src_slots, dst_slots: int64 [M], physical slots on the caches' device; slot
    `src_slots[m]` of every group is copied to `dst_slots[m]`. The two may overlap: everything is
    read before anything is written. dst_slots are distinct. M = 0 does nothing. impl: see
    `specdec_kernels.dispatch.choose`; the Triton form is one launch for two stacks of one shape and
    dtype, such as keys and values, and writes nothing where source and target are one slot.

    Raises ValueError naming the argument if shapes, dtypes, devices or layouts disagree, or, where
    the slots are on the CPU, one lies outside a cache or is written twice. Slots on another device
    are not looked at, as that would wait for it.
    """
    _check_caches(caches, src_slots.device)
    _check_indices(src_slots, dst_slots, "slots", [c.shape[1] * c.shape[2] for c in caches])
    if src_slots.numel():
        form = choose("compact_kv", impl, src_slots.device)
        form([by_slot(cache) for cache in caches], src_slots, dst_slots)


def copy_pages(
    caches: Sequence[Tensor], src_pages: Tensor, dst_pages: Tensor, *, impl: Impl = "auto"
) -> None:
    """Copies whole pages in every group, for copy-on-write.

    As `compact_kv`, with int64 page ids [M] instead of slots. Raises ValueError likewise.
    """
    _check_caches(caches, src_pages.device)
    _check_indices(src_pages, dst_pages, "pages", [cache.shape[1] for cache in caches])
    if src_pages.numel():
        choose("compact_kv", impl, src_pages.device)(caches, src_pages, dst_pages)


def compact_paths(
    caches: Sequence[Tensor],
    batch: TreeBatch,
    paths: Tensor,
    num_nodes: Tensor,
    *,
    impl: Impl = "auto",
) -> None:
    """Moves the KV of every request's accepted path to where its tokens belong, on the device.

    caches: as for `compact_kv`, with the batch's page size. paths: int32 [R, N], per request the
    accepted nodes from the root down, then anything (`accept` pads with -1). num_nodes: int32 [R],
    how many entries of each path count: the root and the accepted drafted nodes, or 0 to move
    nothing. Node `paths[r, j]` goes from logical slot L + paths[r, j] to L + j. impl: see
    `specdec_kernels.dispatch.choose`; the Triton form is one launch for two stacks of one shape and
    dtype and never makes the host wait.

    Parents are numbered before their children, so a path ascends, node j of it is j or more, and
    moving in ascending order never overwrites a node that is still to be read. Nodes in place are
    neither read nor written.

    Raises ValueError naming the argument if shapes, dtypes, devices or page sizes disagree, a block
    table names a page that a cache lacks, or, where the paths are on the CPU, a path does not
    ascend or leaves its request's nodes. On another device entries that could not be part of an
    ascending path in the request are left out instead.
    """
    _check_caches(caches, paths.device)
    _check_paths(batch, paths, num_nodes)
    highest = max((max(table) for table in batch.block_tables_host if table), default=-1)
    for index, cache in enumerate(caches):
        if cache.shape[2] != batch.page_size or cache.shape[1] <= highest:
            raise ValueError(
                f"caches[{index}]: must have pages of {batch.page_size} slots and more than "
                f"{highest} of them, as the batch's block tables, got {tuple(cache.shape)}"
            )
    if paths.device.type == "cpu":
        _check_path_nodes(batch, paths, num_nodes)
    if paths.numel():
        choose("compact_paths", impl, paths.device)(caches, batch, paths, num_nodes)


def _check_caches(caches: Sequence[Tensor], device: torch.device) -> None:
    for index, cache in enumerate(caches):
        if cache.dim() not in (4, 5):
            raise ValueError(
                f"caches[{index}]: must be [num_groups, num_pages, page_size, Hkv, D] or, for "
                f"scales, [num_groups, num_pages, page_size, Hkv], got {tuple(cache.shape)}"
            )
        if not cache.is_contiguous() or cache.device != device:
            raise ValueError(
                f"caches[{index}]: must be contiguous and on the device of the indices, {device}"
            )


def _check_indices(src: Tensor, dst: Tensor, what: str, limits: list[int]) -> None:
    if not src.dtype == dst.dtype == torch.int64 or src.dim() != 1 or src.shape != dst.shape:
        raise ValueError(
            f"src_{what} and dst_{what}: must be int64 of one length [M], got {src.dtype} "
            f"{tuple(src.shape)} and {dst.dtype} {tuple(dst.shape)}"
        )
    if src.device != dst.device:
        raise ValueError(
            f"src_{what} and dst_{what}: must be on one device, got {src.device} and {dst.device}"
        )
    if src.device.type != "cpu" or not src.numel() or not limits:
        return
    for name, indices in (("src", src), ("dst", dst)):
        lowest, highest = (int(end) for end in torch.aminmax(indices))
        if lowest < 0 or highest >= min(limits):
            raise ValueError(
                f"{name}_{what}: must lie in 0..{min(limits) - 1}, got {lowest}..{highest}"
            )
    if dst.unique().numel() != dst.numel():
        raise ValueError(f"dst_{what}: must be distinct, got {dst.tolist()}")


def _check_paths(batch: TreeBatch, paths: Tensor, num_nodes: Tensor) -> None:
    requests = batch.num_requests
    if paths.dtype != torch.int32 or paths.dim() != 2 or paths.shape[0] != requests:
        raise ValueError(
            f"paths: must be int32 [R = {requests}, N], got {paths.dtype} {tuple(paths.shape)}"
        )
    if num_nodes.dtype != torch.int32 or num_nodes.shape != (requests,):
        raise ValueError(
            f"num_nodes: must be int32 [R = {requests}], got {num_nodes.dtype} "
            f"{tuple(num_nodes.shape)}"
        )
    if not paths.device == num_nodes.device == batch.device:
        raise ValueError(
            f"paths, num_nodes and batch: must be on one device, got {paths.device}, "
            f"{num_nodes.device} and {batch.device}"
        )


def _check_path_nodes(batch: TreeBatch, paths: Tensor, num_nodes: Tensor) -> None:
    for request, (path, length) in enumerate(zip(paths.tolist(), num_nodes.tolist(), strict=True)):
        rows = batch.cu_nodes_host[request + 1] - batch.cu_nodes_host[request]
        if not 0 <= length <= len(path):
            raise ValueError(
                f"num_nodes: request {request} has {length}, must lie in 0..{len(path)}, the "
                "entries of a path"
            )
        nodes = path[:length]
        if sorted(set(nodes)) != nodes or (nodes and not 0 <= nodes[0] <= nodes[-1] < rows):
            raise ValueError(
                f"paths: request {request} has nodes {nodes}, must ascend and lie in 0..{rows - 1}"
            )
