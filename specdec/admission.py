"""From what a caller asks for to requests that can run, or the error that names the field."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.config import EngineConfig
from specdec.errors import InvalidRequestError
from specdec.request import SamplingParams, Speculation
from specdec.request_state import Request
from specdec.sampling.answer import Answer
from specdec.sampling.law import TokenLaw
from specdec.sampling.prompt_logprobs import PromptLogprobs
from specdec.tokenizer import Tokenizer, token_id_list

if TYPE_CHECKING:
    from specdec.sampling.grammar import GrammarCompiler, GrammarMatcher


class Admission:
    """Checks requests against the model and makes the state they run with.

    vocab_size: length of a logits row. max_model_len: most tokens of prompt and output together.
    defaults: of sampling parameters that a request leaves unset.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        defaults: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        # A config may name ids that no row of logits has.
        self._eos_token_ids = frozenset(t for t in eos_token_ids if 0 <= t < vocab_size)
        self._defaults = dict(defaults)
        self._compiler: GrammarCompiler | None = None

    def requests(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        speculation: Speculation,
    ) -> list[Request]:
        """The n answers of a request: the leader, then its siblings.

        Raises InvalidRequestError naming the field.
        """
        prompt = self._checked_prompt(prompt_token_ids)
        params = params.resolved(self._defaults, secrets.randbits(64))
        self._check(params)
        bad_words = self._bad_words(params)
        grammar = self._grammar(params)
        answers: list[Request] = []
        for index in range(params.n):
            leader = answers[0] if answers else None
            answer = self._request(
                f"{request_id}/{index}" if index else request_id,
                prompt,
                _params_of_answer(params, index),
                speculation,
                leader,
                index,
                bad_words,
                grammar if leader is None or grammar is None else grammar.fork(),
            )
            answers.append(answer)
        answers[0].siblings = answers[1:]
        return answers

    def _request(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        speculation: Speculation,
        leader: Request | None,
        index: int,
        bad_words: Sequence[Sequence[int]],
        grammar: GrammarMatcher | None,
    ) -> Request:
        mode = self._config.logprobs_mode
        room = self._max_model_len - len(prompt)
        max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        answer = Answer(params, self._eos_token_ids, self._tokenizer, max_tokens)
        law = TokenLaw(
            params,
            prompt,
            self._vocab_size,
            mode,
            end_token_ids=answer.end_token_ids,
            bad_words=bad_words,
            grammar=grammar,
        )
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            as_logits = mode.endswith("logits")
            prompt_logprobs = PromptLogprobs(prompt, params.prompt_logprobs, as_logits=as_logits)
        return Request(
            request_id,
            prompt,
            params,
            speculation,
            law,
            answer,
            prompt_logprobs=prompt_logprobs,
            leader=leader,
            index=index,
        )

    def _check(self, params: SamplingParams) -> None:
        """Raise for what cannot be with this vocabulary, or without a tokenizer."""
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop", "needs a tokenizer; use stop_token_ids")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self._vocab_size:
                raise InvalidRequestError(
                    name, f"must be an integer in 0..{self._vocab_size}, got {value}"
                )
        words = [word for word in params.bad_words or () if not isinstance(word, str)]
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("bad_words", [token for word in words for token in word])
        self._check_ids("stop_token_ids", params.stop_token_ids or ())

    def _check_ids(self, field: str, token_ids: Sequence[int] | Mapping[int, float]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    field, f"token ids must be in 0..{self._vocab_size - 1}, got {token_id}"
                )

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """The forbidden words as token id sequences."""
        found: list[tuple[int, ...]] = []
        for word in params.bad_words or ():
            if not isinstance(word, str):
                found.append(tuple(word))
            elif self._tokenizer is None:
                raise InvalidRequestError("bad_words", "needs a tokenizer; use token ids")
            else:
                # A spelling with an id past the logits can never come up.
                spellings = self._tokenizer.encode_word(word)
                found += [ids for ids in spellings if max(ids) < self._vocab_size]
        return found

    def _grammar(self, params: SamplingParams) -> GrammarMatcher | None:
        if params.grammar is None:
            return None
        if self._compiler is None:
            if self._tokenizer is None:
                raise InvalidRequestError("grammar", "needs a tokenizer, and this model has none")
            from specdec.sampling.grammar import GrammarCompiler

            self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._compiler.compile(params.grammar)

    def _checked_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        prompt = token_id_list(prompt_token_ids)
        if not prompt:
            raise InvalidRequestError("prompt", "is empty: at least one token is needed")
        if len(prompt) >= self._max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"has {len(prompt)} tokens; at most {self._max_model_len - 1} leave room for an "
                f"answer in the context of {self._max_model_len}",
            )
        self._check_ids("prompt", prompt)
        return prompt


def answer_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request: of answer 0 the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _params_of_answer(params: SamplingParams, index: int) -> SamplingParams:
    assert params.seed is not None
    if index == 0:
        return params
    # The prompt is the same for all: its log-probabilities are computed once.
    return dataclasses.replace(params, seed=answer_seed(params.seed, index), prompt_logprobs=None)
