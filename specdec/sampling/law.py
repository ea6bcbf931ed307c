"""The law of one request: its token at a position, given the logits and everything before it.

Processor order, equal to transformers' for what both have: repetition penalty, presence penalty,
frequency penalty, [temperature 0: argmax], temperature, top-k, top-p, min-p, noise, argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.output import TokenLogprobs
from specdec.request import SamplingParams
from specdec.sampling.logprobs import token_logprobs
from specdec_kernels.sample import choose_token, surviving_tokens

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """The token of one position and, if asked for, its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None


class TokenLaw:
    """Evaluates one request's parameters at successive positions; owns the penalty history.

    params: resolved (nothing unset that has a default). prompt_token_ids: counted by the
    repetition penalty only. vocab_size: length of the logits rows.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        logprobs_mode: str,
    ) -> None:
        assert params.temperature is not None
        assert params.top_k is not None
        assert params.top_p is not None
        assert params.min_p is not None
        assert params.repetition_penalty is not None
        assert params.seed is not None
        self._temperature = params.temperature
        self._filters = (params.top_k, params.top_p, params.min_p)
        self._seed = params.seed
        self._num_top = params.logprobs
        self._logprobs_mode = logprobs_mode
        self._repetition = np.float32(params.repetition_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._has_repetition = params.repetition_penalty != 1.0
        self._has_output_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._seen = np.zeros(vocab_size if self._has_repetition else 0, dtype=np.bool_)
        self._counts = np.zeros(vocab_size if self._has_output_penalty else 0, dtype=np.float32)
        if self._has_repetition:
            self._seen[np.asarray(prompt_token_ids, dtype=np.int64)] = True

    def choose(self, logits: Floats, position: int) -> Choice:
        """The token at `position`, from float32 [V] raw logits, which are left unchanged.

        Raises ValueError if the row has a NaN, a +inf or no finite logit.
        """
        processed = self._penalised(logits)
        top_k, top_p, min_p = self._filters
        token_id = choose_token(
            processed,
            temperature=self._temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=self._seed,
            position=position,
        )
        if self._num_top is None:
            return Choice(token_id, None)
        row = logits if self._logprobs_mode.startswith("raw") else self._filtered(processed)
        as_logits = self._logprobs_mode.endswith("logits")
        return Choice(token_id, token_logprobs(row, token_id, self._num_top, as_logits=as_logits))

    def append(self, token_id: int) -> None:
        """Add an emitted token to the history that later positions are penalised by."""
        if self._has_repetition:
            self._seen[token_id] = True
        if self._has_output_penalty:
            self._counts[token_id] += 1

    def _penalised(self, logits: Floats) -> Floats:
        if not (self._has_repetition or self._has_output_penalty):
            return logits
        row = logits.copy()
        if self._has_repetition:
            seen = np.flatnonzero(self._seen)
            old = row[seen]
            row[seen] = np.where(old > 0, old / self._repetition, old * self._repetition)
        if self._has_output_penalty:
            used = np.flatnonzero(self._counts)
            row[used] -= self._presence
            row[used] -= self._frequency * self._counts[used]
        return row

    def _filtered(self, processed: Floats) -> Floats:
        """The processed logits over the temperature, filtered tokens at -inf."""
        if self._temperature == 0.0:
            return processed
        kept, _ = surviving_tokens(processed, self._temperature, *self._filters)
        row = np.full_like(processed, -np.inf)
        row[kept] = processed[kept] / np.float32(self._temperature)
        return row
