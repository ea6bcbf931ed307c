"""A private copy of a transformers module whose attention is ours; the user's is not touched.

The copy shares every parameter (tying kept) and owns only configs, buffers and module objects. Its
attention layers call one function, registered under one private name, which finds the step that is
running through an object that all modules of the copy carry. No mask function is registered, so the
masks that models build are None, and tree structure reaches attention through the step alone.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specdec.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "specdec_tree"
_HOOK = "_specdec_attention_hook"


class Attend(Protocol):
    """Attention of the running step: layer index; query [S, Hq, D], key and value [S, Hkv, D]."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor: ...


class AttentionHook:
    """Where the attention function finds the step: `attend` is set for the time of one forward."""

    def __init__(self) -> None:
        self.attend: Attend | None = None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, heads, S, D] in, [1, S, heads, D] out."""
    hook: AttentionHook = module.__dict__[_HOOK]
    if hook.attend is None:
        raise RuntimeError("this module belongs to a specdec engine and cannot be called directly")
    if attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} builds its own attention mask; trees cannot be scored with it"
        )
    if kwargs.get("s_aux") is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which are not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = hook.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
    )
    return out.unsqueeze(0), None


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a module, in eval mode, that shares every parameter and nothing else."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    copied: PreTrainedModel = copy.deepcopy(model, memo=shared).eval()
    return copied


def make_skeleton(model: PreTrainedModel) -> tuple[PreTrainedModel, AttentionHook]:
    """The private copy of a model, in eval mode, and the hook its attention layers call.

    Raises ModelError if the model does not let its attention be chosen.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    skeleton = shared_copy(model)
    try:
        skeleton.set_attn_implementation(ATTENTION_NAME)
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} does not use transformers' attention interface: {error}"
        ) from error
    hook = AttentionHook()
    for module in skeleton.modules():
        module.__dict__[_HOOK] = hook
    return skeleton, hook
