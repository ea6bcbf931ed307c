"""Linear layers with weights laid out once for few rows, in the private skeleton only."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_ROWS = 16
"""Rows the layout is made for: a tree of the default size with its root."""

_TOLERANCE = 2e-2
"""Largest relative error against the untouched layer: two results rounded to bf16 apart."""


class PackedLinear(torch.nn.Module):
    """A linear layer whose weight oneDNN has reordered into blocks.

    Same result to rounding; a quarter faster than torch's own layout up to 16 rows, since the
    weight is not laid out anew in every call. Holds a copy of the weight.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # Not a buffer: an opaque layout cannot be saved, moved or cast.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self._packed, self.bias, "none", [], ""
        )
        return result


def can_pack(model: PreTrainedModel) -> bool:
    """Whether packing is known to pay: bf16 on a CPU whose oneDNN computes it natively."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return False
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except AttributeError:  # a torch built without oneDNN
        return False


@torch.inference_mode()
def pack_linears(skeleton: PreTrainedModel) -> list[torch.nn.Linear]:
    """Replace the linear layers of a private skeleton by packed ones; returns those replaced.

    Every packed layer is compared with the original on random rows; one that differs by more than
    rounding, or cannot be packed, stays as it is, with a line in the log.
    """
    replaced = []
    generator = torch.Generator().manual_seed(0)
    for parent_name, parent in list(skeleton.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not torch.nn.Linear:
                continue
            try:
                packed = PackedLinear(child)
                error = _relative_error(packed, child, generator)
            except RuntimeError as problem:
                logger.warning("%s.%s stays unpacked: %s", parent_name, name, problem)
                continue
            if not error <= _TOLERANCE:
                logger.warning("%s.%s stays unpacked: error %.1e", parent_name, name, error)
                continue
            setattr(parent, name, packed)
            replaced.append(child)
    return replaced


def _relative_error(
    packed: PackedLinear, linear: torch.nn.Linear, generator: torch.Generator
) -> float:
    rows = torch.randn(1, 3, linear.in_features, generator=generator).to(linear.weight.dtype)
    want = linear(rows).float()
    return float((packed(rows).float() - want).norm() / want.norm().clamp_min(1e-30))


def drop_weights(model: PreTrainedModel, linears: list[torch.nn.Linear]) -> None:
    """Free the weights that packed copies stand for; `model` can no longer be run.

    A weight that anything else uses, such as a tied embedding, is kept, as a copy: as long as one
    tensor points into a mapped checkpoint file, all pages of the file that were read stay resident.
    """
    packed = {id(linear.weight) for linear in linears}
    used_elsewhere = {
        id(parameter)
        for module in model.modules()
        if type(module) is not torch.nn.Linear
        for parameter in module.parameters(recurse=False)
    }
    for parameter in model.parameters():
        is_packed = id(parameter) in packed - used_elsewhere
        parameter.data = parameter.data.new_empty(0) if is_packed else parameter.data.clone()
