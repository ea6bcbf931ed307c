"""What a quantised KV cache holds: one number per element, one scale per token and head.

element = number * scale. Scales belong to single tokens because a scale that later tokens could
change would change the bits of tokens already committed.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes of quantised caches and the largest magnitude that each one uses."""


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers and scales of the rows of x, with the same bits on every device.

    x: floating [..., D], D >= 1; read as fp32. dtype: int8 or float8_e4m3fn. Returns the numbers,
    [..., D] of dtype, and the scales, fp32 [...]: scale = max |x| / limit with limit 127 or 448,
    number = x / scale, both true fp32 divisions, rounded to nearest even and held within the limit.

    A row of zeros has scale 0 and numbers 0, and so has one whose scale is too small for fp32. A
    row that holds a NaN or an infinity (after rounding to fp32) has scale NaN and numbers 0: all of
    it reads as NaN, as no scale could tell which elements were good. The error of an element is at
    most scale / 2 (int8), or its own magnitude / 16 + scale / 1024 (fp8), and a few fp32 roundings,
    while scales are normal fp32 numbers.

    Raises ValueError naming the argument for another dtype or an x that is not floating.
    """
    if dtype not in LIMITS:
        raise ValueError(f"dtype: must be int8 or float8_e4m3fn, got {dtype}")
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"x: must be floating [..., D], got {x.dtype} {tuple(x.shape)}")
    limit = LIMITS[dtype]
    x = x.float()
    amax = x.abs().amax(-1)
    # A tensor as divisor: by a Python number, CUDA multiplies with a rounded reciprocal.
    scales = amax / amax.new_full((), limit)
    usable = (scales > 0) & torch.isfinite(amax)
    ratio = x / torch.where(usable, scales, 1.0).unsqueeze(-1)
    ratio = torch.where(usable.unsqueeze(-1), ratio, 0.0).clamp(-limit, limit)
    numbers = (ratio.round() if dtype == torch.int8 else ratio).to(dtype)
    return numbers, torch.where(torch.isfinite(amax), scales, float("nan"))


def dequantise(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements that numbers [..., D] and fp32 scales [...] stand for, [..., D] of dtype.

    The product is computed in fp32 and rounded to dtype once. Raises ValueError naming the argument
    if the numbers are of no quantised dtype or the scales do not fit them.
    """
    if numbers.dtype not in LIMITS:
        raise ValueError(f"numbers: must be int8 or float8_e4m3fn, got {numbers.dtype}")
    if scales.dtype != torch.float32 or scales.shape != numbers.shape[:-1]:
        raise ValueError(
            f"scales: must be float32 {tuple(numbers.shape[:-1])}, got {scales.dtype} "
            f"{tuple(scales.shape)}"
        )
    return (numbers.float() * scales.unsqueeze(-1)).to(dtype)


def check_scales(key_cache: Tensor, key_scales: Tensor | None, value_scales: Tensor | None) -> None:
    """Raises ValueError naming the argument unless scales come with quantised caches, and fit.

    key_cache: [num_pages, page_size, Hkv, D]; scales: fp32 [num_pages, page_size, Hkv].
    """
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if key_cache.dtype not in LIMITS:
            if scales is not None:
                raise ValueError(
                    f"{name}: must be None, as a {key_cache.dtype} cache has no scales; only int8 "
                    "and float8_e4m3fn have"
                )
        elif scales is None or scales.dtype != torch.float32 or scales.shape != key_cache.shape[:3]:
            got = None if scales is None else f"{scales.dtype} {tuple(scales.shape)}"
            raise ValueError(
                f"{name}: a {key_cache.dtype} cache needs float32 {tuple(key_cache.shape[:3])}, "
                f"got {got}"
            )
        elif scales.device != key_cache.device or not scales.is_contiguous():
            raise ValueError(f"{name}: must be contiguous and on the cache's device")
