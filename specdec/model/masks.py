"""What a model's own masks hide, compared with what its attention layers say they hide.

Tree attention gets no mask: it knows which tokens a row may see from the tree, and a window from
the `sliding_window` that a layer passes. A window that lives in the mask alone would be lost, and
no run over a short text would show it. So the masks are asked once: under a second private name,
models hand over the function (query index, key index) -> visible that they would build a mask from,
which can be asked about texts of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from specdec.errors import ModelError
from specdec.model.skeleton import (
    ATTENTION_NAME,
    AttentionHook,
    attention_function,
    choose_attention,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_INSPECTION_NAME = "specdec_inspection"
_LONGEST = 1 << 20
"""Masks are asked about texts of at most this many tokens."""


class MaskInspection:
    """The masks of one forward: which function each was made from, and which layer got which."""

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, MaskFunction]] = []
        self.of_layer: dict[int, torch.Tensor | None] = {}

    def add(self, mask: torch.Tensor, function: MaskFunction) -> None:
        """Remember what a mask was made from."""
        self._made.append((mask, function))

    def check(self, layer: int, window: int | None, longest: int | None) -> None:
        """Raise ModelError unless the layer's mask is causal with exactly this window.

        longest: the most tokens that a text can have; what would differ beyond it does not matter.
        """
        mask = self.of_layer.get(layer)
        function: MaskFunction = _causal
        device = torch.device("cpu")
        if mask is not None:
            place = mask.untyped_storage().data_ptr()
            made_from = [f for made, f in self._made if made.untyped_storage().data_ptr() == place]
            if not made_from:
                raise ModelError(
                    f"layer {layer} puts something of its own into the attention mask (a bias, or "
                    "a choice of tokens), which tree attention does not compute"
                )
            function, device = made_from[0], mask.device
        ask = _Ask(function, layer, device)
        _check_function(ask, layer, window, min(longest or _LONGEST, _LONGEST))


@contextmanager
def inspect_masks(skeleton: PreTrainedModel, hook: AttentionHook) -> Iterator[MaskInspection]:
    """Let the skeleton build masks for the time of one forward of one token, and collect them."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_INSPECTION_NAME, attention_function)
    AttentionMaskInterface.register(_INSPECTION_NAME, _make_mask)
    choose_attention(skeleton, _INSPECTION_NAME)
    inspection = MaskInspection()
    token = _running.set(inspection)
    hook.masks = inspection.of_layer
    try:
        yield inspection
    finally:
        hook.masks = None
        _running.reset(token)
        choose_attention(skeleton, ATTENTION_NAME)


_running: ContextVar[MaskInspection] = ContextVar("running mask inspection")


def _make_mask(
    *_: Any,
    mask_function: MaskFunction,
    batch_size: int = 1,
    q_length: int = 1,
    kv_length: int = 1,
    device: Any = None,
    **__: Any,
) -> torch.Tensor:
    """transformers' mask interface: a mask that hides nothing, with its function remembered."""
    mask = torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device)
    _running.get().add(mask, mask_function)
    return mask


def _causal(
    _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    return key <= query


def _check_function(ask: _Ask, layer: int, window: int | None, longest: int) -> None:
    near = set(range(40)) | {2**power + more for power in range(5, 21) for more in (-1, 0, 1)}
    if window is not None:
        near |= {window - 1, window, window + 1, 2 * window, 2 * window + 1}
    near = {place for place in near | {longest - 1} if place < longest}
    queries = torch.tensor(sorted(near))[:, None]
    back = torch.tensor([-7, -1, *sorted(near)])[None, :]
    keys = queries - back
    exists = keys >= 0
    visible = ask(queries.expand_as(keys), keys.clamp_min(0))
    wanted = back >= 0 if window is None else (back >= 0) & (back < window)
    if bool((visible & (back < 0)).any()):
        raise ModelError(
            f"layer {layer} lets tokens see later ones: only causal attention can write text"
        )
    if bool((exists & wanted & ~visible).any()):
        raise ModelError(
            f"layer {layer} hides tokens in its mask alone ({_reach(ask, longest)}), without "
            "passing that as a sliding window to attention, where trees are scored"
        )
    if bool((exists & visible & ~wanted).any()):
        raise ModelError(
            f"layer {layer} passes a sliding window of {window} to attention, but its mask shows "
            "more than that"
        )


def _reach(ask: _Ask, longest: int) -> str:
    """How far the first token of a text is seen: the size of a window or of a chunk."""
    queries = torch.arange(longest)
    hidden = ~ask(queries, torch.zeros_like(queries))
    if not bool(hidden.any()):
        return "a pattern"
    return f"a window or chunk of {int(hidden.int().argmax())} tokens"


class _Ask:
    """A mask function over index tensors of one shape; raises ModelError where it cannot answer."""

    def __init__(self, function: MaskFunction, layer: int, device: torch.device) -> None:
        self._function = function
        self._layer = layer
        self._device = device

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        try:
            visible = self._function(zero, zero, queries.to(self._device), keys.to(self._device))
        except (IndexError, RuntimeError) as error:
            raise ModelError(
                f"layer {self._layer} has a mask that depends on the tokens of a text, which "
                f"cannot follow a tree ({error})"
            ) from error
        return visible.expand_as(queries).cpu()
