"""Entry point of write_kv: validation and choice of form."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.write_kv.reference import reference_write_kv


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Stores each row's key and value at its physical slot.

    key, value: [S, Hkv, D]. key_cache, value_cache: [num_pages, page_size, Hkv, D], contiguous, of
    the same dtype and device; both are changed in place. slots: int64 [S], distinct physical slots
    (`TreeBatch.slots`); every other slot keeps its bits.

    Raises ValueError naming the argument if shapes or dtypes disagree, RuntimeError if a cache is
    not contiguous.
    """
    _check(key, value, key_cache, value_cache, slots)
    if key.device.type == "cuda":
        from specdec_kernels.write_kv.triton import triton_write_kv

        triton_write_kv(key, value, key_cache, value_cache, slots)
    else:
        reference_write_kv(key, value, key_cache, value_cache, slots)


def _check(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            "key_cache and value_cache: must have one shape [num_pages, page_size, Hkv, D], got "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if key.shape != value.shape or key.dim() != 3 or key.shape[1:] != key_cache.shape[2:]:
        raise ValueError(
            "key and value: must be [S, Hkv, D] with the cache's Hkv and D, "
            f"{tuple(key_cache.shape[2:])}, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if slots.dtype != torch.int64 or slots.shape != key.shape[:1]:
        raise ValueError(
            f"slots: must be int64 [{key.shape[0]}], got {slots.dtype} {tuple(slots.shape)}"
        )
    if not key.dtype == value.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(
            "key, value and caches: must have one dtype, got "
            f"{key.dtype}, {value.dtype}, {key_cache.dtype} and {value_cache.dtype}"
        )
