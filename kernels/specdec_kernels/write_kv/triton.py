"""write_kv as one Triton launch; imported only when chosen.

A program takes one row and a block of KV heads, of keys and values alike. Quantising is written
with integers and correctly rounded divisions, so that every GPU gives the bits of `quantise`; fp8
caches are passed as bytes, as sm_80 has no e4m3 conversions.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.configuration import Configuration
from specdec_kernels.write_kv.reference import check_range

_ELEMENTS = 1024
"""Elements of a program's tile: a few per thread, and 16 rows still make many programs."""
_NUM_WARPS, _NUM_STAGES = 2, 1
_QUANTISED = (torch.int8, torch.float8_e4m3fn)
_SHAPES = ((3, 64), (8, 128))
_MORE_SHAPES = ((32, 80), (16, 256))
"""KV heads and head dimension; further ones have a padded tile and the widest head."""
_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.float8_e4m3fn: "u8",
}


# fmt: off
@triton.jit
def _round_to_int(x):
    """Nearest int32, ties to even, of |x| < 2 ** 22: beside 1.5 * 2 ** 23 no fraction fits."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _encode_e4m3(x):
    """Bits of the e4m3 number nearest to fp32 x, ties to even, saturating at 448."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    # Keep 3 of 23 mantissa bits; then the exponent's bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 numbers are multiples of 2 ** -9.
    small = tl.minimum(magnitude, 0x3C800000).to(tl.float32, bitcast=True)
    code = tl.where(magnitude < 0x3C800000, _round_to_int(small * 512.0), normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _quantise(x, FP8: tl.constexpr):
    """Numbers and scales of fp32 x [heads, dims]; the rules are those of `quantise`."""
    # As integers, magnitudes keep their order, and infinities and NaN are above all others.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = largest < 0x7F800000
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 448.0 if FP8 else 127.0)
    usable = finite & (scale > 0.0)
    ratio = tl.div_rn(x, tl.where(usable, scale, 1.0)[:, None])
    ratio = tl.where(usable[:, None], ratio, 0.0)
    if FP8:
        number = _encode_e4m3(ratio)
    else:
        number = tl.minimum(tl.maximum(_round_to_int(ratio), -127), 127).to(tl.int8)
    return number, tl.where(finite, scale, float("nan"))


@triton.jit
def _write_row(
    x_ptr, cache_ptr, scales_ptr, x_at, target, heads, heads_at, mask, head_mask,
    QUANTISED: tl.constexpr, FP8: tl.constexpr,
):
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0)
    if QUANTISED:
        number, scale = _quantise(x.to(tl.float32), FP8)
        tl.store(scales_ptr + heads_at + heads, scale, mask=head_mask)
        tl.store(cache_ptr + target, number, mask=mask)
    else:
        tl.store(cache_ptr + target, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_kv_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, key_scales_ptr, value_scales_ptr,
    slots_ptr, key_row, key_head, value_row, value_head, num_heads,
    D: tl.constexpr, D_PAD: tl.constexpr, HEADS: tl.constexpr,
    QUANTISED: tl.constexpr, FP8: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, D_PAD)
    head_mask = heads < num_heads
    mask = head_mask[:, None] & (dims < D)[None, :]
    heads_at = slot * num_heads
    target = (heads_at + heads)[:, None] * D + dims[None, :]
    key_at = row * key_row + heads[:, None] * key_head + dims[None, :]
    _write_row(key_ptr, key_cache_ptr, key_scales_ptr, key_at, target, heads, heads_at, mask,
               head_mask, QUANTISED, FP8)
    value_at = row * value_row + heads[:, None] * value_head + dims[None, :]
    _write_row(value_ptr, value_cache_ptr, value_scales_ptr, value_at, target, heads, heads_at,
               mask, head_mask, QUANTISED, FP8)
# fmt: on


def constants(num_heads: int, head_dim: int, cache: torch.dtype) -> dict[str, Any]:
    """What a launch for such a cache fixes at compile time."""
    padded = triton.next_power_of_2(head_dim)
    return {
        "D": head_dim,
        "D_PAD": padded,
        "HEADS": min(triton.next_power_of_2(num_heads), max(1, _ELEMENTS // padded)),
        "QUANTISED": cache in _QUANTISED,
        "FP8": cache == torch.float8_e4m3fn,
    }


def configurations() -> list[Configuration]:
    """Every shipped form: model dtypes into their own, a wider and the quantised caches."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    pairs = [(bf16, bf16), (fp16, fp16), (fp32, fp32), (bf16, fp32)]
    pairs += [(key, cache) for key in (bf16, fp16, fp32) for cache in _QUANTISED]
    found = [_configuration(*pair, heads, dim) for pair in pairs for heads, dim in _SHAPES]
    for cache in (bf16, *_QUANTISED):
        found += [_configuration(bf16, cache, heads, dim) for heads, dim in _MORE_SHAPES]
    return found


def _configuration(
    key: torch.dtype, cache: torch.dtype, num_heads: int, head_dim: int
) -> Configuration:
    fixed = constants(num_heads, head_dim, cache)
    signature = dict.fromkeys(("key_ptr", "value_ptr"), f"*{_TYPES[key]}")
    signature |= dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), f"*{_TYPES[cache]}")
    scales = "fp32" if cache in _QUANTISED else _TYPES[key]  # without scales, the keys stand in
    signature |= dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), f"*{scales}")
    signature |= {"slots_ptr": "*i64"}
    signature |= dict.fromkeys(("key_row", "key_head", "value_row", "value_head"), "i32:16")
    return Configuration(
        name=f"write_kv/write/{_TYPES[key]}-{_TYPES[cache]}-d{head_dim}-h{fixed['HEADS']}",
        kernel=write_kv_kernel,
        signature=signature | {"num_heads": "i32"},
        constants=fixed,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        needs_matrix=False,
    )


def triton_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """As `write_kv`, without checks but, in the interpreter, that of the slots' range."""
    num_rows, num_heads, head_dim = key.shape
    if not key.numel():
        return
    if slots.device.type == "cpu":
        check_range(slots, key_cache.shape[0] * key_cache.shape[1])
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    fixed = constants(num_heads, head_dim, key_cache.dtype)
    if fixed["FP8"]:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    write_kv_kernel[(num_rows, triton.cdiv(num_heads, fixed["HEADS"]))](
        key, value, key_cache, value_cache,
        key if key_scales is None else key_scales,
        value if value_scales is None else value_scales,
        slots.contiguous(), *key.stride()[:2], *value.stride()[:2], num_heads,
        num_warps=_NUM_WARPS, num_stages=_NUM_STAGES, **fixed,
    )  # fmt: skip
