"""Numbers and scales of quantised caches, against an independent computation in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec_kernels import dequantise, quantise
from tests.kernels import kv_cases as cases

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LIMITS = {INT8: 127.0, FP8: 448.0}
BOTH = pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)


def e4m3_values() -> np.ndarray:
    """What the 256 codes mean: 1 sign bit, 4 exponent bits with bias 7, 3 mantissa bits."""
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    normal = (1 + mantissa) * 2.0 ** (exponent - 7)
    magnitude = np.where(exponent == 0, mantissa * 2.0**-6, normal)
    return sign * np.where(codes & 0x7F == 0x7F, np.nan, magnitude)


def nearest_codes(ratio: np.ndarray) -> np.ndarray:
    """By trying all codes; of two that are equally near, the one with an even mantissa."""
    magnitudes = e4m3_values()[:127]
    distance = np.abs(np.abs(ratio)[..., None] - magnitudes)
    odd = np.arange(127) & 1
    best = np.lexsort((np.broadcast_to(odd, distance.shape), distance), axis=-1)[..., 0]
    return best | (np.signbit(ratio) << 7)


def expected(x: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (fp8: their codes) and scales of finite rows, each fp32 division made in fp64."""
    exact = x.double().numpy()
    scales = (np.abs(exact).max(-1) / LIMITS[dtype]).astype(np.float32)
    divisor = np.where(scales > 0, scales, 1.0).astype(np.float64)[..., None]
    ratio = (exact / divisor).astype(np.float32).astype(np.float64)
    ratio = np.where(scales[..., None] > 0, ratio, 0.0)
    if dtype == INT8:
        return np.clip(np.rint(ratio), -127, 127).astype(np.int8), scales
    return nearest_codes(ratio).astype(np.uint8), scales


def raw(numbers: Tensor) -> np.ndarray:
    bits: np.ndarray = (numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers).numpy()
    return bits


@BOTH
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounds_to_nearest_even(source: torch.dtype, dtype: torch.dtype) -> None:
    x = cases.awkward_rows(source, dtype)
    numbers, scales = quantise(x, dtype)
    wanted, wanted_scales = expected(x, dtype)
    assert numbers.dtype == dtype
    assert scales.dtype == torch.float32
    assert np.array_equal(scales.numpy().view(np.int32), wanted_scales.view(np.int32))
    assert np.array_equal(raw(numbers), wanted)
    # The rows hold exact ties in numbers, or this test could not tell one rounding from another.
    ratio = x.double() / torch.where(scales > 0, scales, 1.0).double().unsqueeze(-1)
    assert (ratio.frac().abs() == 0.5).sum() > 50


def test_every_fp8_code_survives() -> None:
    values = torch.from_numpy(e4m3_values())
    finite = values.isfinite()
    assert finite.sum() == 254
    numbers, scale = quantise(values[finite], FP8)
    assert scale == 1
    assert np.array_equal(raw(numbers), np.arange(256)[finite.numpy()])
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    read = dequantise(codes, torch.tensor(1.0), torch.float64)
    np.testing.assert_array_equal(read.numpy(), e4m3_values())
    assert torch.equal(torch.signbit(read), torch.arange(256) >= 128)


@BOTH
def test_rows_of_zeros_have_scale_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0], [0.0, -3.0, 1.5]])
    numbers, scales = quantise(x, dtype)
    assert scales[0] == 0
    assert raw(numbers)[0].tolist() == [0, 0, 0]
    assert torch.equal(dequantise(numbers, scales, torch.float32)[0], torch.zeros(3))
    assert scales[1] == torch.tensor(3.0) / LIMITS[dtype]


@BOTH
def test_magnitudes_from_denormal_to_huge(dtype: torch.dtype) -> None:
    """The error of an element, relative to its row's largest, does not depend on the magnitude."""
    base = torch.linspace(-1, 1, 41, dtype=torch.float64)
    for exponent in (-118, -60, 0, 60, 127):
        x = (base * 2.0**exponent).float()
        numbers, scale = quantise(x, dtype)
        error = (dequantise(numbers, scale, torch.float64) - x.double()).abs()
        half_step = scale.double() / 2
        if dtype == FP8:
            half_step = torch.maximum(x.double().abs() / 16, scale.double() / 1024)
        assert (error <= half_step * (1 + 1e-5)).all()
    smallest = torch.tensor([2.0**-149, -(2.0**-149), 0.0])
    numbers, scale = quantise(smallest, dtype)
    assert scale == 0
    assert raw(numbers).tolist() == [0, 0, 0]


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_nan_or_infinity_reads_as_nan(bad: float, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]])
    numbers, scales = quantise(x, dtype)
    assert raw(numbers)[0].tolist() == [0, 0, 0]
    assert dequantise(numbers, scales, torch.float32)[0].isnan().all()
    clean, clean_scales = quantise(x[1:], dtype)
    assert np.array_equal(raw(numbers)[1:], raw(clean))
    assert torch.equal(scales[1:], clean_scales)


def test_wide_elements_are_read_as_fp32() -> None:
    x = torch.tensor([1.0, 1e39], dtype=torch.float64)
    assert quantise(x, INT8)[1].isnan()
    assert quantise(x[:1], INT8)[1] == torch.tensor(1.0) / 127


def test_refused_arguments() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"dtype: must be int8 or float8_e4m3fn, got torch\.int16"):
        quantise(x, torch.int16)
    with pytest.raises(ValueError, match="x: must be floating"):
        quantise(x.int(), INT8)
    numbers, scales = quantise(x, INT8)
    with pytest.raises(ValueError, match="numbers: must be int8 or float8_e4m3fn"):
        dequantise(x, scales, torch.float32)
    with pytest.raises(ValueError, match=r"scales: must be float32 \(2,\), got torch.float32 \(1,"):
        dequantise(numbers, scales[:1], torch.float32)
