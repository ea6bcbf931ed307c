"""The rotary embedding that a GGUF file describes, as transformers' rope_parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.model.gguf_keys import GgufKeys

if TYPE_CHECKING:
    import torch

# llama.cpp stores the factors that Llama 3's scaling comes to, not the numbers they come from. All
# published models have these two; the length they were trained on at first is a power of two.
_LOW, _HIGH = 1.0, 4.0
_ORIGINAL_LENGTHS = [1 << bits for bits in (13, *range(4, 13), *range(14, 21))]

_TOLERANCE = 1e-4

ReadTensor = Callable[[str], "torch.Tensor"]


def rope_parameters(
    keys: GgufKeys, read: ReadTensor, head_dim: int, *, partial: bool = False
) -> dict[str, Any]:
    """The `rope_parameters` of a config.

    Args:
        keys: the file's metadata.
        read: gives a tensor of the file by name.
        head_dim: of queries and keys.
        partial: whether the architecture can leave part of a head unrotated.

    Raises:
        ModelError: a kind of scaling that transformers has no equal of.
    """
    found: dict[str, Any] = {"rope_theta": keys.get("rope.freq_base", 10000.0)}
    rotated = keys.get("rope.dimension_count", head_dim)
    if partial:
        found["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise keys.refusal("rope.dimension_count", rotated, f"its heads have {head_dim} dimensions")
    return found | _scaling(keys, read, found["rope_theta"], rotated)


def _scaling(keys: GgufKeys, read: ReadTensor, theta: float, rotated: int) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    original = keys.get("rope.scaling.original_context_length")
    keys.ignore("rope.scaling.finetuned")
    if "rope_factors_long.weight" in keys.tensors:
        return _longrope(keys, read, original)
    if "rope_freqs.weight" in keys.tensors:
        return _llama3(keys, read("rope_freqs.weight"), theta, rotated)
    if kind == "none" or factor in (None, 0, 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = original or keys.need("context_length")
        scaling["beta_fast"] = keys.get("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = keys.get("rope.scaling.yarn_beta_slow", 1.0)
        return scaling
    raise keys.refusal("rope.scaling.type", kind, "known are none, linear, yarn, and factor tables")


def _longrope(keys: GgufKeys, read: ReadTensor, original: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": read("rope_factors_long.weight").tolist(),
        "short_factor": read("rope_factors_short.weight").tolist(),
        "original_max_position_embeddings": original or keys.need("context_length"),
    }
    attention_factor = keys.get("rope.scaling.attn_factor")
    return found if attention_factor is None else found | {"attention_factor": attention_factor}


def _llama3(keys: GgufKeys, factors: torch.Tensor, theta: float, rotated: int) -> dict[str, Any]:
    """The numbers that give these factors, found by trying the few that are in use."""
    wanted = factors.flatten().tolist()
    factor = max(wanted)
    if factor <= 1.0:
        return {"rope_type": "default"}
    for original in _ORIGINAL_LENGTHS:
        got = _llama3_factors(theta, rotated, factor, original)
        if len(got) == len(wanted) and all(
            math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(got, wanted, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": float(round(factor, 4)),
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }
    raise ModelError(
        f"{keys.path}: the factors in rope_freqs.weight follow no rope scaling that transformers "
        "has: use the model's safetensors checkpoint instead"
    )


def _llama3_factors(theta: float, rotated: int, factor: float, original: int) -> list[float]:
    """What each frequency is divided by: Llama 3.1's rule, as llama.cpp's converter has it."""
    factors = []
    for index in range(0, rotated, 2):
        wavelength = 2 * math.pi * theta ** (index / rotated)
        if wavelength < original / _HIGH:
            factors.append(1.0)
        elif wavelength > original / _LOW:
            factors.append(factor)
        else:
            smooth = (original / wavelength - _LOW) / (_HIGH - _LOW)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
