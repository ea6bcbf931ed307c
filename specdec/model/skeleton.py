"""A private copy of a transformers module whose attention is ours; the user's is not touched.

The copy shares every parameter (tying kept) and owns only configs, buffers and module objects. Its
attention layers call one function, registered under a private name, which finds the step that is
running through an object that all modules of the copy carry. No mask function is registered under
that name, so the masks that models build are None, and tree structure reaches attention through the
step alone. `specdec.model.masks` registers another name, under which masks can be looked at once.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specdec.errors import ModelError
from specdec.model.progress import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "specdec_tree"
_HOOK = "_specdec_attention_hook"

# What models pass on to every attention function, and what none of them computes with.
_IGNORED = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)


class Attend(Protocol):
    """Attention of the running step: layer index; query [S, Hq, D], key and value [S, Hkv, D].

    sinks: [Hq] logits that take part in the softmax and carry no value, or None.
    """

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
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...


class AttentionHook:
    """Where the attention function finds the step.

    attend: set for the time of one forward. masks: while masks are looked at, the mask that each
    call brought, by layer; None while they must not exist.
    """

    def __init__(self) -> None:
        self.attend: Attend | None = None
        self.masks: dict[int, torch.Tensor | None] | None = None


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, heads, S, D] in, [1, S, heads, D] out.

    Raises ModelError for a mask, for attention that looks ahead, and for any argument that it does
    not know, since such an argument would change the result.
    """
    hook: AttentionHook = module.__dict__[_HOOK]
    if hook.attend is None:
        raise RuntimeError("this module belongs to a specdec engine and cannot be called directly")
    name = type(module).__name__
    layer: int | None = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelError(f"{name} does not know which layer it is, so it has no place for its keys")
    if hook.masks is not None:
        hook.masks[layer] = attention_mask
    elif attention_mask is not None:
        raise ModelError(f"{name} builds a mask of its own, which knows nothing of token trees")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and not causal:
        raise ModelError(
            f"{name} lets every token see later ones: only causal attention can write text"
        )
    unknown = sorted(n for n, given in kwargs.items() if given is not None and n not in _IGNORED)
    if unknown:
        raise ModelError(
            f"{name} passes {', '.join(unknown)} to attention, which tree attention does not "
            "compute"
        )
    out = hook.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def run_rows(
    module: PreTrainedModel,
    hook: AttentionHook,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    attend: Attend,
) -> torch.Tensor:
    """Logits [J, V] of the judged rows, from one forward over flat rows.

    token_ids, positions: int64 [S]. rows: int64 [J], indices into the rows. The skeleton `module`
    calls `attend` in its attention layers.
    """
    hook.attend = attend
    try:
        output = module(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
        )
    finally:
        hook.attend = None
    logits: torch.Tensor = output.logits[0]
    return logits


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

    AttentionInterface.register(ATTENTION_NAME, attention_function)
    skeleton = shared_copy(model)
    choose_attention(skeleton, ATTENTION_NAME)
    hook = AttentionHook()
    for module in skeleton.modules():
        module.__dict__[_HOOK] = hook
    return skeleton, hook


def choose_attention(skeleton: PreTrainedModel, name: str) -> None:
    """Make all layers of a skeleton call the attention function registered under `name`.

    Raises ModelError if the model goes its own ways.
    """
    problem = ""
    try:
        with quiet_transformers():  # a model that cannot be switched says so in a warning only
            skeleton.set_attn_implementation(name)
    except (ValueError, NotImplementedError, AttributeError) as error:
        problem = f": {error}"
    config = skeleton.config.get_text_config(decoder=True)
    if problem or config._attn_implementation != name:
        raise ModelError(
            "it computes attention by itself, not through transformers' attention interface, so "
            f"token trees cannot be scored with it{problem}"
        )
