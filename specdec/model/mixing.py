"""Which module lets one token change another's result outside attention, if any does.

Every other module of a decoder treats rows one by one. Recurrences, convolutions and attention that
does not go through transformers' interface do not, and cannot follow a tree. Looked for only once a
model is known to be unfit, to be able to say why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from specdec.model.skeleton import AttentionHook, run_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = 1e-2
"""Relative: far above what another order of summation does to a row."""


def attend_to_self(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Attention of rows that see nothing but themselves."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


@torch.inference_mode()
def find_mixing(skeleton: PreTrainedModel, hook: AttentionHook) -> str | None:
    """What mixes rows outside attention and why that is no good, or None if nothing was found.

    Two runs of two rows differ in the first row only; the module looked for gets the same second
    row in both and makes different ones of it. Never raises: it only serves a message.
    """
    try:
        mixing = _mixing_module(skeleton, hook)
    except Exception:
        return None
    if mixing is None:
        return None
    return (
        f"{mixing} carries something from token to token outside attention (a recurrence, a "
        "convolution, or attention of its own), which cannot branch into a tree"
    )


def _mixing_module(skeleton: PreTrainedModel, hook: AttentionHook) -> str | None:
    """The class and place of the first module that mixes rows."""
    runs = [_second_rows(skeleton, hook, first) for first in (1, 2)]
    for name, (before, after) in runs[0].items():
        if name not in runs[1]:
            continue
        other_before, other_after = runs[1][name]
        if _same(before, other_before) and not _same(after, other_after):
            return f"{type(skeleton.get_submodule(name)).__name__} ({name})"
    return None


@torch.inference_mode()
def ignores_positions(skeleton: PreTrainedModel, hook: AttentionHook) -> bool:
    """Whether the second row's position changes neither its queries and keys nor its logits."""
    seen: list[list[torch.Tensor]] = []
    for position in (5, 9):
        tensors: list[torch.Tensor] = []

        def attend(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            _kept: list[torch.Tensor] = tensors,
            **_: Any,
        ) -> torch.Tensor:
            _kept += [query[-1], key[-1]]
            return attend_to_self(layer, query, key, value)

        tensors.append(_run(skeleton, hook, [1, 1], [0, position], attend)[-1])
        seen.append(tensors)
    return all(_same(a, b) for a, b in zip(*seen, strict=True))


def _second_rows(
    skeleton: PreTrainedModel, hook: AttentionHook, first: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The second row of every module's input and output, by name, in the order they finish."""
    rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = []

    def watch(name: str) -> Any:
        def keep(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            before = next(_row_tensors((*args, *kwargs.values())), None)
            after = next(_row_tensors(output if isinstance(output, tuple) else (output,)), None)
            if before is not None and after is not None:
                rows.setdefault(name, (before, after))

        return keep

    for name, module in skeleton.named_modules():
        if name:
            handles.append(module.register_forward_hook(watch(name), with_kwargs=True))
    try:
        _run(skeleton, hook, [first, 0], [0, 1], attend_to_self)
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _run(
    skeleton: PreTrainedModel,
    hook: AttentionHook,
    token_ids: list[int],
    positions: list[int],
    attend: Any,
) -> torch.Tensor:
    ids, places, rows = (
        torch.tensor(values, dtype=torch.int64, device=skeleton.device)
        for values in (token_ids, positions, range(len(token_ids)))
    )
    return run_rows(skeleton, hook, ids, places, rows, attend)


def _row_tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The second of two rows, of every [1, 2, ...] or [2, ...] tensor of floats."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.dim() >= 3 and value.shape[:2] == (1, 2):
                yield value[0, 1].float().clone()
            elif value.dim() == 2 and value.shape[0] == 2:
                yield value[1].float().clone()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return float((one - other).norm()) <= _TOLERANCE * float(one.norm().clamp_min(1e-6))
