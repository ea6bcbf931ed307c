"""What changes a row of logits before temperature and filters, one class a parameter.

Each is made for one answer, is applied once to every position that is emitted, in order, and is
told the token that was emitted there. That is why stateful ones, a user's among them, need not know
about trees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.errors import InvalidRequestError
from specdec.request import LogitsProcessor, SamplingParams

Floats = NDArray[np.float32]


class RowProcessor(Protocol):
    """Changes the logits of the next position.

    field: the parameter it stands for. apply changes a float32 [V] row in place; append takes the
    token emitted there.
    """

    field: str

    def apply(self, row: Floats) -> None: ...

    def append(self, token_id: int) -> None: ...


class LogitBias:
    """Adds a number to the logits of some tokens (transformers: sequence_bias of single tokens)."""

    field = "logit_bias"

    def __init__(self, bias: dict[int, float]) -> None:
        self._ids = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float32)

    def apply(self, row: Floats) -> None:
        """Add the biases."""
        row[self._ids] += self._bias

    def append(self, token_id: int) -> None:
        """Nothing depends on what was emitted."""


class RepetitionPenalty:
    """Weakens what is in the prompt or the output (CTRL, Keskar et al. 2019)."""

    field = "repetition_penalty"

    def __init__(self, penalty: float, prompt: Sequence[int], vocab_size: int) -> None:
        self._penalty = np.float32(penalty)
        self._seen = np.zeros(vocab_size, dtype=np.bool_)
        self._seen[np.asarray(prompt, dtype=np.int64)] = True

    def apply(self, row: Floats) -> None:
        """Divide positive and multiply negative logits of the tokens seen.

        Raises InvalidRequestError if the penalty is so small that a logit becomes infinite.
        """
        seen = np.flatnonzero(self._seen)
        old = row[seen]
        with np.errstate(divide="ignore", over="ignore"):
            new = np.where(old > 0, old / self._penalty, old * self._penalty)
        if (((new == np.inf) | np.isnan(new)) & (old < np.inf)).any():
            raise InvalidRequestError(self.field, "makes a logit infinite: use a larger one")
        row[seen] = new

    def append(self, token_id: int) -> None:
        """The token is seen."""
        self._seen[token_id] = True


class OutputPenalties:
    """Presence and frequency penalty: subtract once, and once per occurrence, in the output."""

    def __init__(self, presence: float, frequency: float, vocab_size: int) -> None:
        self.field = "presence_penalty" if presence else "frequency_penalty"
        self._presence = np.float32(presence)
        self._frequency = np.float32(frequency)
        self._counts = np.zeros(vocab_size, dtype=np.float32)

    def apply(self, row: Floats) -> None:
        """Subtract from the logits of tokens in the output."""
        used = np.flatnonzero(self._counts)
        row[used] -= self._presence
        row[used] -= self._frequency * self._counts[used]

    def append(self, token_id: int) -> None:
        """The token occurs once more."""
        self._counts[token_id] += 1


class BadWords:
    """Forbids the last token of each sequence where prompt and output end with the others.

    As transformers' bad_words_ids, but an EOS may be forbidden too.
    """

    field = "bad_words"

    def __init__(self, words: Sequence[Sequence[int]], prompt: Sequence[int]) -> None:
        self._always = sorted({word[0] for word in words if len(word) == 1})
        # Words by the token before their last: few of many can be completed at a position.
        self._longer: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for *before, last in words:
            if before:
                self._longer[before[-1]].append((before, last))
        self._keep = max((len(word) - 1 for word in words), default=0)
        self._tail = list(prompt[-self._keep :]) if self._keep else []

    def apply(self, row: Floats) -> None:
        """-inf for the tokens that would complete a sequence."""
        row[self._always] = -np.inf
        for before, last in self._longer.get(self._tail[-1], ()) if self._tail else ():
            if self._tail[-len(before) :] == before:
                row[last] = -np.inf

    def append(self, token_id: int) -> None:
        """Later tokens follow this one."""
        if self._keep:
            self._tail = [*self._tail, token_id][-self._keep :]


class MinTokens:
    """Forbids the tokens that end an answer until it has so many tokens."""

    field = "min_tokens"

    def __init__(self, min_tokens: int, end_token_ids: frozenset[int]) -> None:
        self._left = min_tokens
        self._ends = sorted(end_token_ids)

    def apply(self, row: Floats) -> None:
        """-inf for the ending tokens while more are needed."""
        if self._left > 0:
            row[self._ends] = -np.inf

    def append(self, token_id: int) -> None:
        """One less is needed."""
        self._left -= 1


class AllowedTokens:
    """Forbids all tokens but some."""

    field = "allowed_token_ids"

    def __init__(self, allowed: Sequence[int], vocab_size: int) -> None:
        self._forbidden = np.ones(vocab_size, dtype=np.bool_)
        self._forbidden[list(allowed)] = False

    def apply(self, row: Floats) -> None:
        """-inf for every other token."""
        row[self._forbidden] = -np.inf

    def append(self, token_id: int) -> None:
        """Nothing depends on what was emitted."""


class UserProcessors:
    """The caller's own functions of (token ids, scores), called as transformers calls them."""

    field = "logits_processors"

    def __init__(self, functions: Sequence[LogitsProcessor], prompt: Sequence[int]) -> None:
        self._functions = [self._own(function) for function in functions]
        self._token_ids = list(prompt)

    def apply(self, row: Floats) -> None:
        """Replace the row by what the functions make of it, one after the other.

        Raises InvalidRequestError if one raises, or returns anything but scores of the same shape.
        """
        if not (row < np.inf).all():
            return  # a fault of the model, which is reported as such
        token_ids = torch.tensor([self._token_ids])
        for function in self._functions:
            scores = torch.from_numpy(row.copy()).unsqueeze(0)
            try:
                result = function(token_ids, scores)
            except Exception as error:
                raise self._fault(function, f"raised {type(error).__name__}: {error}") from error
            if not isinstance(result, torch.Tensor) or result.shape != scores.shape:
                shape = getattr(result, "shape", None)
                got = type(result).__name__ if shape is None else f"shape {tuple(shape)}"
                raise self._fault(function, f"must return scores [1, {len(row)}], got {got}")
            row[:] = result[0].float().numpy(force=True)
            if not (row < np.inf).all():
                raise self._fault(function, "returned a score that is NaN or +inf")

    def append(self, token_id: int) -> None:
        """Later calls see this token."""
        self._token_ids.append(token_id)

    @classmethod
    def _own(cls, function: LogitsProcessor) -> LogitsProcessor:
        """The function itself, or its clone: a method by which a stateful one is shared out."""
        clone = getattr(function, "clone", None)
        if clone is None:
            return function
        try:
            own: LogitsProcessor = clone()
        except Exception as error:
            raise cls._fault(function, f"raised {type(error).__name__}: {error}") from error
        if not callable(own):
            raise cls._fault(function, f"was cloned to {type(own).__name__}, not to a function")
        return own

    @staticmethod
    def _fault(function: LogitsProcessor, message: str) -> InvalidRequestError:
        name = getattr(function, "__name__", type(function).__name__)
        return InvalidRequestError("logits_processors", f"{name} {message}")


def row_processors(
    params: SamplingParams,
    prompt: Sequence[int],
    vocab_size: int,
    end_token_ids: frozenset[int],
    bad_words: Sequence[Sequence[int]],
    grammar: RowProcessor | None,
) -> list[RowProcessor]:
    """The processors that the parameters ask for, in the order in which they apply.

    It is transformers' order for what both have; the masks of ours stand where its masks do, after
    the penalties. Parameters that change nothing have no processor.
    """
    found: list[RowProcessor] = []
    if params.logit_bias:
        found.append(LogitBias(dict(params.logit_bias)))
    if params.repetition_penalty != 1.0:
        assert params.repetition_penalty is not None
        found.append(RepetitionPenalty(params.repetition_penalty, prompt, vocab_size))
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        found.append(OutputPenalties(params.presence_penalty, params.frequency_penalty, vocab_size))
    if bad_words:
        found.append(BadWords(bad_words, prompt))
    if params.min_tokens > 0 and end_token_ids:
        found.append(MinTokens(params.min_tokens, end_token_ids))
    if params.allowed_token_ids is not None:
        found.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    if params.logits_processors:
        found.append(UserProcessors(params.logits_processors, prompt))
    if grammar is not None:
        found.append(grammar)
    return found
