"""What a model's attention layers are, found by running it rather than by its name."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specdec.errors import ModelError
from specdec.model.architecture import check_servable
from specdec.model.defaults import max_model_len
from specdec.model.masks import inspect_masks
from specdec.model.mixing import attend_to_self, find_mixing
from specdec.model.skeleton import AttentionHook, make_skeleton, run_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """KV heads and head dimension of a layer; the window (in tokens) and softcap that it passes."""

    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class ServableModel:
    """A private copy of a model, the hook that its attention layers call, those layers in order,
    and the length of a logits row.
    """

    skeleton: PreTrainedModel
    hook: AttentionHook
    layers: list[AttentionLayer]
    vocab_size: int


@torch.inference_mode()
def discover(model: PreTrainedModel) -> ServableModel:
    """Make the private copy of a model and find its attention layers, by forwards of one token.

    Raises ModelError, with the reason, unless every decoder layer calls the attention function
    once, with nothing that tree attention does not compute, and under masks that hide exactly what
    the windows hide.
    """
    try:
        check_servable(model.config)
        skeleton, hook = make_skeleton(model)
        layers, vocab_size = _discover(skeleton, hook)
    except ModelError as error:
        raise ModelError(f"{type(model).__name__} cannot be served: {error}") from error
    return ServableModel(skeleton, hook, layers, vocab_size)


def _discover(skeleton: PreTrainedModel, hook: AttentionHook) -> tuple[list[AttentionLayer], int]:
    if not {"position_ids", "kwargs"} & set(inspect.signature(skeleton.forward).parameters):
        raise ModelError("it takes no position_ids, so rows cannot have places of their own")
    with inspect_masks(skeleton, hook) as masks:
        masked, _ = _call_once(skeleton, hook)
    _check_calls(skeleton, hook, [layer for layer, _ in masked])
    longest = max_model_len(skeleton.config)
    for layer, found in masked:
        masks.check(layer, found.window, longest)
    calls, vocab_size = _call_once(skeleton, hook)
    if calls != masked:
        raise ModelError("its attention layers differ between two runs of one token")
    return [found for _, found in sorted(calls, key=lambda call: call[0])], vocab_size


def _call_once(
    skeleton: PreTrainedModel, hook: AttentionHook
) -> tuple[list[tuple[int, AttentionLayer]], int]:
    """The attention calls of a forward of one token, and the length of a logits row."""
    calls: list[tuple[int, AttentionLayer]] = []

    def attend(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        if key.shape != value.shape:
            raise ModelError(
                f"its keys have {key.shape[-1]} dimensions and its values {value.shape[-1]} "
                "(latent attention), and a page holds both in one size"
            )
        if sinks is not None and sinks.shape != (query.shape[1],):
            raise ModelError(
                f"its attention sinks are of shape {tuple(sinks.shape)}, not one for each head"
            )
        calls.append((layer, AttentionLayer(key.shape[1], key.shape[2], window, softcap)))
        return attend_to_self(layer, query, key, value)

    row = torch.zeros(1, dtype=torch.int64, device=skeleton.device)
    logits = _forward(skeleton, hook, row, attend)
    return calls, int(logits.shape[-1])


def _forward(
    skeleton: PreTrainedModel, hook: AttentionHook, row: torch.Tensor, attend: Callable[..., Any]
) -> torch.Tensor:
    try:
        return run_rows(skeleton, hook, row, row, row, attend)
    except ModelError:
        raise
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ModelError(
            f"it does not run over flat rows ({type(error).__name__}: {first_line})"
        ) from error


def _check_calls(skeleton: PreTrainedModel, hook: AttentionHook, calls: list[int]) -> None:
    expected = int(skeleton.config.get_text_config(decoder=True).num_hidden_layers)
    if sorted(calls) == list(range(expected)):
        return
    mixing = find_mixing(skeleton, hook)
    if mixing is not None:
        raise ModelError(mixing)
    repeated = [layer for layer, count in Counter(calls).items() if count > 1]
    if repeated:
        raise ModelError(
            f"layer {min(repeated)} computes attention {calls.count(min(repeated))} times, and its "
            "keys have one place for each token"
        )
    raise ModelError(
        f"{len(calls)} of its {expected} decoder layers call the attention function (layers "
        f"{sorted(calls)}); the others cannot be seen"
    )
