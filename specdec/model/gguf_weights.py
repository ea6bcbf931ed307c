"""From the tensors of a GGUF file to the weights of a transformers model.

llama.cpp's converter (https://github.com/ggml-org/llama.cpp, conversion/) stores some weights in
another form than transformers; each transform here undoes one of those. Every weight of the model
must be in the file, and every tensor of the file in the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.model.gguf_header import GgufHeader
from specdec.model.progress import Advance

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Transform = Callable[["Sequence[torch.Tensor]"], "torch.Tensor"]

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}

_CHUNK = 1 << 22
"""Weights unpacked at a time: a piece of fp32 beside the tensor that is being filled."""

_ROPE_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Read with the config."""

_INSTEAD = "use the model's safetensors checkpoint instead"


def check_quantisations(header: GgufHeader) -> None:
    """Refuse a file with tensors that cannot be unpacked.

    Raises:
        ModelError: names the tensor, its quantisation, and those that can.
    """
    from gguf import GGMLQuantizationType

    for tensor in header.tensors.values():
        if not _can_unpack(tensor.quantisation):
            readable = [kind.name for kind in GGMLQuantizationType if _can_unpack(kind.name)]
            raise ModelError(
                f"{header.path}: tensor {tensor.name} is {tensor.quantisation}, which cannot be "
                f"unpacked; these can: {', '.join(readable)}"
            )


@cache
def _can_unpack(quantisation: str) -> bool:
    """Whether the gguf package unpacks a block of this kind: it has no list, so by trying."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    if quantisation in _PLAIN:
        return True
    kind = GGMLQuantizationType[quantisation]
    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def read_tensor(header: GgufHeader, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the file, unpacked.

    Args:
        header: of the file.
        name: as llama.cpp calls it.
        dtype: of the result; fp32 by default. Unpacking itself is in fp32.
    """
    import numpy as np
    import torch
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    tensor = header.tensors[name]
    kind = GGMLQuantizationType[tensor.quantisation]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    columns = tensor.shape[-1]
    if columns % block:
        raise ModelError(
            f"{header.path}: rows of {name} have {columns} weights, which {kind.name} cannot hold: "
            "the file is corrupt, download it again"
        )
    rows_and_bytes = (math.prod(tensor.shape[:-1]), columns // block * block_bytes)
    data = np.memmap(header.path, np.uint8, "r", tensor.offset, rows_and_bytes)
    result = torch.empty(data.shape[0], columns, dtype=dtype or torch.float32)
    step = max(_CHUNK // columns, 1)
    for start in range(0, data.shape[0], step):
        rows = np.array(data[start : start + step])
        if tensor.quantisation in _PLAIN:
            plain = getattr(torch, _PLAIN[tensor.quantisation])
            result[start : start + step] = torch.from_numpy(rows).view(plain)
        else:
            result[start : start + step] = torch.from_numpy(dequantize(rows, kind))
    return result.reshape(tensor.shape)


def load_weights(model: PreTrainedModel, header: GgufHeader, advance: Advance) -> None:
    """Give a model on the meta device the file's weights, in bf16.

    Args:
        model: made from the file's config; its parameters are replaced.
        header: of the file.
        advance: called with the number of weights that each tensor adds.

    Raises:
        ModelError: a weight that is not in the file, a tensor that the model has no place for, or
            one of another shape than the config says; names it.
    """
    sources = _Sources(model.config, header)
    unused = set(header.tensors) - _ROPE_TENSORS
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        gguf_names, transform = sources.of(name)
        missing = [source for source in gguf_names if source not in header.tensors]
        if missing or not gguf_names:
            raise ModelError(
                f"{header.path} lacks {missing[0] if missing else 'a tensor'} for the model's "
                f"weight {name}: use a complete GGUF file or the model's safetensors checkpoint"
            )
        state[name] = _weight(header, gguf_names, transform, parameter, name)
        unused.difference_update(gguf_names)
        advance(parameter.numel())
    if unused:
        raise ModelError(
            f"{header.path} has {len(unused)} tensors that {type(model).__name__} has no place "
            f"for, {min(unused)} first: {_INSTEAD}"
        )
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()


def _weight(
    header: GgufHeader,
    gguf_names: Sequence[str],
    transform: Transform | None,
    parameter: torch.Tensor,
    name: str,
) -> torch.Tensor:
    import torch

    # A norm is stored as 1 + w: rounding must wait until the 1 is gone.
    dtype = torch.float32 if transform is _minus_one else torch.bfloat16
    parts = [read_tensor(header, source, dtype) for source in gguf_names]
    try:
        weight = parts[0] if transform is None else transform(parts)
        fits = _without_ones(weight.shape) == _without_ones(parameter.shape)
    except RuntimeError:  # a transform whose view does not fit
        fits = False
    if not fits:
        raise ModelError(
            f"{header.path}: {gguf_names[0]} has the shape {tuple(parts[0].shape)}, which does not "
            f"give {name} its {tuple(parameter.shape)}: {_INSTEAD}"
        )
    return weight.reshape(parameter.shape).to(torch.bfloat16).contiguous()


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


class _Sources:
    """Where each weight of a model comes from."""

    def __init__(self, config: Any, header: GgufHeader) -> None:
        import gguf

        self._architecture = header.architecture
        self._heads = config.num_attention_heads
        self._kv_heads = getattr(config, "num_key_value_heads", None) or self._heads
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        layers = config.num_hidden_layers
        self._names = gguf.get_tensor_name_map(kinds[self._architecture], layers)

    def of(self, name: str) -> tuple[list[str], Transform | None]:
        """The file's tensors that a weight is made of, and how; no tensors if none is known."""
        if found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+)", name):
            return self._of_experts(f"blk.{found[1]}", found[2])
        if found := re.fullmatch(r"(.*)\.norms\.(\d+)\.weight", name):  # StableLM: one a head
            base = self._names.get_name(found[1])
            return ([f"{base}.weight"] if base else []), partial(_row, index=int(found[2]))
        base, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, dot, suffix = name, ".", "weight"
        gguf_base = self._names.get_name(base)
        return ([gguf_base + dot + suffix] if gguf_base else []), self._transform(name)

    def _transform(self, name: str) -> Transform | None:
        match self._architecture:
            case "llama" | "granite" if ".q_proj." in name:
                return partial(_unpermuted, heads=self._heads)
            case "llama" | "granite" if ".k_proj." in name:
                return partial(_unpermuted, heads=self._kv_heads)
            case "gemma" | "gemma2" | "gemma3" if name.endswith("norm.weight"):
                return _minus_one
            case "gpt2" if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
                return _transposed
            case "gptneox" if ".query_key_value." in name:
                return partial(_by_head, heads=self._heads)
        return None

    def _of_experts(self, block: str, name: str) -> tuple[list[str], Transform | None]:
        down = [f"{block}.ffn_down_exps.weight"]
        gate_up = [f"{block}.ffn_{part}_exps.weight" for part in ("gate", "up")]
        if self._architecture != "gpt-oss":
            return {"gate_up_proj": (gate_up, _stacked_rows), "down_proj": (down, None)}[name]
        return {
            "gate_up_proj": (gate_up, _interleaved),
            "gate_up_proj_bias": ([part.replace("weight", "bias") for part in gate_up], _zipped),
            "down_proj": (down, _transposed),
            "down_proj_bias": ([down[0].replace("weight", "bias")], None),
        }[name]


def _unpermuted(parts: Sequence[torch.Tensor], heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring dimensions together, transformers the two halves of a head."""
    weight = parts[0]
    rows = weight.shape[0] // heads // 2
    return weight.view(heads, rows, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _minus_one(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] - 1.0


def _transposed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].transpose(-1, -2)


def _row(parts: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    return parts[0][index]


def _by_head(parts: Sequence[torch.Tensor], heads: int) -> torch.Tensor:
    """All queries, keys, values one after the other: to q, k, v of each head in turn."""
    weight = parts[0]
    split = weight.view(3, heads, -1, *weight.shape[1:])
    return split.transpose(0, 1).reshape(weight.shape)


def _stacked_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[experts, rows, columns] of gate and up: gate's rows, then up's."""
    import torch

    return torch.cat(list(parts), dim=1)


def _interleaved(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of gate and up by turns, then columns first."""
    import torch

    experts, rows, columns = parts[0].shape
    return torch.stack(list(parts), dim=2).reshape(experts, 2 * rows, columns).transpose(1, 2)


def _zipped(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[experts, rows] of gate and up: values by turns."""
    import torch

    return torch.stack(list(parts), dim=2).flatten(1)
