"""Entry points of compact_kv and copy_pages: validation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.compact_kv.reference import reference_move


def compact_kv(caches: Sequence[Tensor], src_slots: Tensor, dst_slots: Tensor) -> None:
    """Moves the KV of an accepted path to where its tokens belong.

    caches: tensors [num_groups, num_pages, page_size, Hkv, D], contiguous, all layers' keys or
    values stacked in front; changed in place. src_slots, dst_slots: int64 [M], physical slots on
    the caches' device; slot `src_slots[m]` of every group is copied to `dst_slots[m]`. The two may
    overlap: everything is read before anything is written. dst_slots are distinct. M = 0 does
    nothing.

    Raises ValueError naming the argument if shapes or dtypes disagree, RuntimeError if a cache is
    not contiguous.
    """
    _check(caches, src_slots, dst_slots, "slots")
    if src_slots.numel():
        flat = [cache.view(cache.shape[0], -1, *cache.shape[3:]) for cache in caches]
        reference_move(flat, src_slots, dst_slots)


def copy_pages(caches: Sequence[Tensor], src_pages: Tensor, dst_pages: Tensor) -> None:
    """Copies whole pages in every group, for copy-on-write.

    As `compact_kv`, with int64 page ids [M] instead of slots. Raises ValueError likewise.
    """
    _check(caches, src_pages, dst_pages, "pages")
    if src_pages.numel():
        reference_move(caches, src_pages, dst_pages)


def _check(caches: Sequence[Tensor], src: Tensor, dst: Tensor, what: str) -> None:
    for index, cache in enumerate(caches):
        if cache.dim() != 5:
            raise ValueError(
                f"caches[{index}]: must be [num_groups, num_pages, page_size, Hkv, D], got "
                f"{tuple(cache.shape)}"
            )
    if not src.dtype == dst.dtype == torch.int64 or src.dim() != 1 or src.shape != dst.shape:
        raise ValueError(
            f"src_{what} and dst_{what}: must be int64 of one length [M], got {src.dtype} "
            f"{tuple(src.shape)} and {dst.dtype} {tuple(dst.shape)}"
        )
