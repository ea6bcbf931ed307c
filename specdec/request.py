"""What a caller asks for: sampling parameters, speculation, and how a request ended."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.errors import InvalidRequestError

MAX_SEED = 2**64 - 1
MAX_TREE_NODES = 255
"""Drafted nodes of a request in one step at most: a tree has up to 256 nodes with its root."""


class FinishReason(enum.Enum):
    """Why a request ended; errors are raised, never finish reasons of a served answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def _number(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequestError(field, f"must be a number, got {value!r}")
    number = float(value)
    bracket = "(" if open_low else "["
    if math.isnan(number) or number < low or number > high or (open_low and number == low):
        raise InvalidRequestError(
            field, f"must be a finite number in {bracket}{low:g}, {high:g}], got {value!r}"
        )
    return number


def _integer(field: str, value: object, low: int, high: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequestError(field, f"must be an integer, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        top = "" if high is None else f" and at most {high}"
        raise InvalidRequestError(field, f"must be at least {low}{top}, got {number}")
    return number


def _strings(field: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    values = (value,) if isinstance(value, str) else tuple(value)
    for item in values:
        if not isinstance(item, str) or not item:
            raise InvalidRequestError(field, f"must be non-empty strings, got {item!r}")
    return values


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a request ends; unset fields take the model's defaults.

    temperature: 0 is greedy; unset is generation_config.json's, else 1.0.
    top_k: number of most probable tokens kept; 0 or -1 keeps all. Ties with the last are kept.
    top_p: smallest set of most probable tokens whose mass reaches top_p, in (0, 1].
    min_p: tokens at least min_p times as probable as the best one, in [0, 1].
    repetition_penalty: divides positive and multiplies negative logits of tokens that are in the
        prompt or the output (CTRL, Keskar et al. 2019), in (0, 100].
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once or
        per occurrence, in [-2, 2].
    seed: 0 .. 2**64 - 1; unset draws one from the operating system, and the answer reports it.
    stop: strings that end the output; the text is cut before the first of them.
    stop_token_ids: token ids that end the output like an EOS.
    ignore_eos: EOS tokens do not end the output (stop_token_ids and stop still do).
    max_tokens: most tokens to emit; unset is the room left in the context.
    logprobs: number of most probable alternatives reported with each token; 0 reports the chosen
        token alone; unset reports nothing.

    Raises InvalidRequestError naming the field and its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": tuple(
                _integer("stop_token_ids", token, 0, None) for token in self.stop_token_ids or ()
            ),
        }
        if self.temperature is not None:
            checked["temperature"] = _number("temperature", self.temperature, 0.0, 100.0)
        if self.top_k is not None:
            checked["top_k"] = max(0, _integer("top_k", self.top_k, -1, None))
        if self.top_p is not None:
            checked["top_p"] = _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        if self.min_p is not None:
            checked["min_p"] = _number("min_p", self.min_p, 0.0, 1.0)
        if self.repetition_penalty is not None:
            checked["repetition_penalty"] = _number(
                "repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True
            )
        if self.seed is not None:
            checked["seed"] = _integer("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError("ignore_eos", f"must be a bool, got {self.ignore_eos!r}")
        if self.max_tokens is not None:
            checked["max_tokens"] = _integer("max_tokens", self.max_tokens, 1, None)
        if self.logprobs is not None:
            checked["logprobs"] = _integer("logprobs", self.logprobs, 0, None)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def resolved(self, defaults: Mapping[str, Any], seed: int) -> SamplingParams:
        """The same parameters with nothing unset but max_tokens and logprobs.

        defaults: sampling defaults of the model (a field name to a value).
        seed: used if this request has none.
        """
        neutral = {
            "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        }  # fmt: skip
        changes: dict[str, Any] = {
            name: defaults.get(name, value)
            for name, value in neutral.items()
            if getattr(self, name) is None
        }
        if self.max_tokens is None and "max_tokens" in defaults:
            changes["max_tokens"] = defaults["max_tokens"]
        if self.seed is None:
            changes["seed"] = seed
        return dataclasses.replace(self, **changes)


class SpeculationMode(enum.Enum):
    """off: no drafts. fixed: trees of up to max_nodes a step. auto: measured cost decides."""

    OFF = "off"
    FIXED = "fixed"
    AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How much a request may be speculated on; never changes what it says.

    mode: "off", "fixed" or "auto".
    max_nodes: drafted nodes a step at most (the root is not counted), 0 .. 255.
    max_depth: depth of the deepest drafted node at most, 0 .. 255.
    drafts: names of the engine's drafters to use; unset uses all of them.
    acceptance: the acceptance rule; "exact" (the walk of the law) is the one there is.
    """

    mode: SpeculationMode | str = SpeculationMode.AUTO
    max_nodes: int = 15
    max_depth: int = 15
    drafts: Sequence[str] | None = None
    acceptance: str = "exact"

    def __post_init__(self) -> None:
        try:
            mode = SpeculationMode(self.mode)
        except ValueError:
            allowed = ", ".join(m.value for m in SpeculationMode)
            raise InvalidRequestError(
                "speculation.mode", f"must be one of {allowed}, got {self.mode!r}"
            ) from None
        object.__setattr__(self, "mode", mode)
        for name in ("max_nodes", "max_depth"):
            value = _integer(f"speculation.{name}", getattr(self, name), 0, MAX_TREE_NODES)
            object.__setattr__(self, name, value)
        if self.drafts is not None:
            object.__setattr__(self, "drafts", _strings("speculation.drafts", self.drafts))
        if self.acceptance != "exact":
            raise InvalidRequestError(
                "speculation.acceptance", f"must be exact, got {self.acceptance!r}"
            )

    @property
    def node_limit(self) -> int:
        """Drafted nodes a step at most, 0 when speculation is off."""
        if self.mode is SpeculationMode.OFF or self.max_depth == 0:
            return 0
        return self.max_nodes
