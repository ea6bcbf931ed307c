"""The law of one answer: its token at a position, given the logits and everything before it.

Order, equal to transformers' for what both have: logit bias, repetition, presence and frequency
penalty, bad words, min_tokens, allowed tokens, the caller's processors, grammar, [temperature 0:
argmax], temperature, top-k, top-p, min-p, noise, argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specdec.errors import InvalidRequestError
from specdec.output import TokenLogprobs
from specdec.request import SamplingParams
from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.processors import row_processors
from specdec_drafts.tree import TokenTree
from specdec_kernels.sample import choose_token, surviving_tokens

if TYPE_CHECKING:
    from specdec.sampling.grammar import GrammarMatcher

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Choice:
    """The token of one position and, if asked for, its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None


class TokenLaw:
    """Evaluates one answer's parameters at successive positions; owns what they remember.

    params: resolved (nothing unset that has a default). vocab_size: length of the logits rows.
    end_token_ids: tokens that end the answer, which min_tokens holds back. bad_words: of params, as
    token ids. grammar: of params, compiled, at its start.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        logprobs_mode: str,
        *,
        end_token_ids: frozenset[int] = frozenset(),
        bad_words: Sequence[Sequence[int]] = (),
        grammar: GrammarMatcher | None = None,
    ) -> None:
        assert params.temperature is not None
        assert params.top_k is not None
        assert params.top_p is not None
        assert params.min_p is not None
        assert params.seed is not None
        self._temperature = params.temperature
        self._filters = (params.top_k, params.top_p, params.min_p)
        self._seed = params.seed
        self._num_top = params.logprobs
        self._logprobs_mode = logprobs_mode
        self._grammar = grammar
        self._processors = row_processors(
            params, prompt_token_ids, vocab_size, end_token_ids, bad_words, grammar
        )

    def choose(self, logits: Floats, position: int) -> Choice:
        """The token at `position`, from float32 [V] raw logits, which are left unchanged.

        To be called once for each emitted position, in order.
        Raises ValueError if the row has a NaN, a +inf or no finite logit; InvalidRequestError if
        the parameters leave no token, or a processor of the caller's fails.
        """
        processed = self._processed(logits, position)
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
        """Add an emitted token to the history that later positions depend on."""
        for processor in self._processors:
            processor.append(token_id)

    def prune(self, tree: TokenTree) -> TokenTree:
        """The tree without drafted nodes that the grammar forbids: scoring them would be a waste.

        Changes nothing else; other parameters are cheap to judge where the walk gets to.
        """
        return tree if self._grammar is None else self._grammar.prune(tree)

    def _processed(self, logits: Floats, position: int) -> Floats:
        if not self._processors:
            return logits
        row = logits.copy()
        for processor in self._processors:
            processor.apply(row)
            if row.max() == -np.inf and logits.max() > -np.inf:
                names = [other.field for other in self._processors]
                names = names[: names.index(processor.field) + 1]
                raise InvalidRequestError(
                    names[-1], f"no token is left at position {position} after {', '.join(names)}"
                )
        return row

    def _filtered(self, processed: Floats) -> Floats:
        """The processed logits over the temperature, filtered tokens at -inf."""
        if self._temperature == 0.0:
            return processed
        kept, _ = surviving_tokens(processed, self._temperature, *self._filters)
        row = np.full_like(processed, -np.inf)
        with np.errstate(over="ignore"):
            row[kept] = processed[kept] / np.float32(max(self._temperature, 1e-30))
        return row
