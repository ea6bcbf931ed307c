"""What a caller asks for: sampling parameters, speculation, and how a request ended."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec import validation
from specdec.errors import InvalidRequestError
from specdec.grammar import Grammar

if TYPE_CHECKING:
    import torch

LogitsProcessor = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""transformers' call: token ids so far int64 [1, n], scores float32 [1, V], to new scores."""

MAX_SEED = 2**64 - 1
MAX_SAMPLES = 128
MAX_TREE_NODES = 255
"""Drafted nodes of a request in one step at most: a tree has up to 256 nodes with its root."""


class FinishReason(enum.Enum):
    """Why a request ended; errors are raised, never finish reasons of a served answer."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a request ends; unset fields take the model's defaults.

    docs/sampling.md has the law of each and the order in which they apply.

    temperature: 0 is greedy; unset is generation_config.json's, else 1.0.
    top_k: number of most probable tokens kept; 0 or -1 keeps all. Ties with the last are kept.
    top_p: smallest set of most probable tokens whose mass reaches top_p, in (0, 1].
    min_p: tokens at least min_p times as probable as the best one, in [0, 1].
    repetition_penalty: divides positive and multiplies negative logits of tokens that are in the
        prompt or the output (CTRL, Keskar et al. 2019), in (0, 100].
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once or
        per occurrence, in [-2, 2].
    logit_bias: token id to a number in [-100, 100] that is added to its logit.
    allowed_token_ids: no other token is emitted; unset allows all.
    bad_words: strings or token id sequences that never come up; of a sequence, the last token is
        forbidden wherever prompt and output end with the others.
    min_tokens: tokens to emit before EOS, stop tokens and stop strings can end the output.
    grammar: what the text must look like.
    logits_processors: functions of (token ids, scores) as in transformers, called once for each
        emitted position, in order. One with a method clone() is cloned for each answer; any other
        object is shared by all requests that are given it.
    seed: 0 .. 2**64 - 1; unset draws one from the operating system, and the answer reports it.
    n: answers to sample, 1 .. 128. Answer 0 is what n = 1 gives; the seed of answer i > 0 is
        derived from seed and i.
    stop: strings that end the output; the text is cut before the first of them.
    stop_token_ids: token ids that end the output like an EOS.
    include_stop_str_in_output: the text keeps the stop string or the ending token's text.
    ignore_eos: EOS tokens do not end the output (stop_token_ids and stop still do).
    max_tokens: most tokens to emit; unset is the room left in the context.
    skip_special_tokens: special tokens have no text.
    logprobs: number of most probable alternatives reported with each token; 0 reports the chosen
        token alone; unset reports nothing.
    prompt_logprobs: the same for each token of the prompt but the first.
    cache_salt: cached prefixes are shared only among requests of one salt.

    Raises InvalidRequestError naming the field and its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    min_tokens: int = 0
    grammar: Grammar | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _NUMBERS.items():
            open_low = name in ("top_p", "repetition_penalty")
            self._check(name, validation.number, low, high, open_low=open_low)
        for name, (least, most) in _INTEGERS.items():
            self._check(name, validation.integer, least, most)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            self._check(name, validation.boolean)
        self._check("cache_salt", validation.string)
        self._check("logit_bias", _logit_bias)
        self._check("allowed_token_ids", validation.token_ids)
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        object.__setattr__(self, "stop", validation.strings("stop", self.stop))
        ids = validation.token_ids("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids", "must hold at least one token id")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens", f"must be at most max_tokens = {self.max_tokens}: {self.min_tokens}"
            )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequestError("grammar", f"must be a Grammar, got {self.grammar!r}")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequestError("ignore_eos", "cannot be set with a grammar: EOS ends it")

    def _check(self, name: str, check: Callable[..., Any], *args: Any, **options: Any) -> None:
        value = getattr(self, name)
        # None is "unset" only where that is the default; elsewhere it is a wrong type.
        if value is not None or getattr(type(self), name) is not None:
            object.__setattr__(self, name, check(name, value, *args, **options))

    def resolved(self, defaults: Mapping[str, Any], seed: int) -> SamplingParams:
        """The same parameters with everything set that has a default or a neutral value.

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
            changes["max_tokens"] = max(defaults["max_tokens"], self.min_tokens)
        if self.seed is None:
            changes["seed"] = seed
        return dataclasses.replace(self, **changes)


_NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_INTEGERS = {
    "top_k": (-1, None),
    "min_tokens": (0, None),
    "seed": (0, MAX_SEED),
    "n": (1, MAX_SAMPLES),
    "max_tokens": (1, None),
    "logprobs": (0, None),
    "prompt_logprobs": (0, None),
}


def _logit_bias(field: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(field, f"must map token ids to numbers, got {value!r}")
    return {
        validation.integer(field, token, 0): validation.number(field, bias, -100.0, 100.0)
        for token, bias in value.items()
    }


def _bad_words(value: Sequence[str | Sequence[int]] | None) -> tuple[str | tuple[int, ...], ...]:
    words: list[str | tuple[int, ...]] = []
    for item in () if value is None else validation.items("bad_words", value, "words"):
        if isinstance(item, str):
            words.append(validation.string("bad_words", item))
            continue
        ids = validation.items("bad_words", item, "strings or lists of token ids")
        if not ids:
            raise InvalidRequestError("bad_words", "has an empty list of token ids")
        words.append(tuple(validation.integer("bad_words", token, 0) for token in ids))
    return tuple(words)


def _processors(value: Sequence[LogitsProcessor] | None) -> tuple[LogitsProcessor, ...]:
    if value is None:
        return ()
    functions = validation.items("logits_processors", value, "functions")
    for function in functions:
        if not callable(function):
            raise InvalidRequestError(
                "logits_processors", f"must be functions of (token ids, scores), got {function!r}"
            )
    return functions  # type: ignore[return-value]


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
            value = validation.integer(
                f"speculation.{name}", getattr(self, name), 0, MAX_TREE_NODES
            )
            object.__setattr__(self, name, value)
        if self.drafts is not None:
            object.__setattr__(
                self, "drafts", validation.strings("speculation.drafts", self.drafts)
            )
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
