"""Entry point of write_kv: validation and choice of form."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.dispatch import Impl, choose
from specdec_kernels.quantise import LIMITS, check_scales

KEY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Stores each row's key and value at its physical slot.

    key, value: [S, Hkv, D], fp16, bf16, fp32 or fp64, any strides. key_cache, value_cache:
    [num_pages, page_size, Hkv, D], contiguous, of one dtype: the keys' own, one that holds all of
    its values (bf16 keys in an fp32 cache), or int8 or float8_e4m3fn. A quantised cache comes with
    key_scales and value_scales, fp32 [num_pages, page_size, Hkv], contiguous; `quantise` says what
    is stored. slots: int64 [S], distinct physical slots (`TreeBatch.slots`). impl: see
    `specdec_kernels.dispatch.choose`; every form writes the same bits.

    Caches and scales are changed in place, at the given slots only; every other slot keeps its
    bits. Keys are written without their gradients.

    Raises ValueError naming the argument if shapes, dtypes, devices or layouts disagree, or, where
    the slots are on the CPU, one lies outside the cache. Slots on another device are not looked at,
    as that would wait for it.
    """
    _check_shapes(key, value, key_cache, value_cache, slots)
    _check_dtypes(key, value, key_cache, value_cache)
    check_scales(key_cache, key_scales, value_scales)
    form = choose("write_kv", impl, key.device)
    form(
        key.detach(), value.detach(), key_cache, value_cache, slots, key_scales, value_scales
    )  # fmt: skip


def _check_shapes(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            "key_cache and value_cache: must have one shape [num_pages, page_size, Hkv, D], got "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise ValueError("key_cache and value_cache: must be contiguous")
    if key.shape != value.shape or key.dim() != 3 or key.shape[1:] != key_cache.shape[2:]:
        raise ValueError(
            "key and value: must be [S, Hkv, D] with the cache's Hkv and D, "
            f"{tuple(key_cache.shape[2:])}, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if slots.dtype != torch.int64 or slots.shape != key.shape[:1]:
        raise ValueError(
            f"slots: must be int64 [{key.shape[0]}], got {slots.dtype} {tuple(slots.shape)}"
        )
    if not key.device == value.device == key_cache.device == value_cache.device == slots.device:
        raise ValueError(
            f"key, value, key_cache, value_cache and slots: must be on one device, got "
            f"{key.device}, {value.device}, {key_cache.device}, {value_cache.device} and "
            f"{slots.device}"
        )


def _check_dtypes(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    if key.dtype != value.dtype or key.dtype not in KEY_DTYPES:
        raise ValueError(
            "key and value: must have one dtype of fp16, bf16, fp32 and fp64, got "
            f"{key.dtype} and {value.dtype}"
        )
    kept = key_cache.dtype
    fits = kept in LIMITS or (
        kept in KEY_DTYPES and torch.promote_types(key.dtype, kept) == kept
    )  # fmt: skip
    if kept != value_cache.dtype or not fits:
        raise ValueError(
            f"key_cache and value_cache: must both be {key.dtype}, a floating dtype that holds all "
            f"of its values, or int8 or float8_e4m3fn with scales; got {kept} and "
            f"{value_cache.dtype}"
        )
