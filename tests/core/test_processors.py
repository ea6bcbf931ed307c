"""Processors of logits against transformers' own, over random histories."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specdec import LLM, SamplingParams
from specdec.errors import InvalidRequestError
from specdec.sampling.law import TokenLaw
from specdec.testing import tiny_llama, tiny_tokenizer, with_eos
from specdec.tokenizer import Tokenizer

V = 50
END = frozenset({7, 9})
BIAS = {3: -100.0, 4: 2.5, 9: 0.125}
WORDS = [[3], [4, 5], [5, 5, 6], [1, 2, 1, 2, 8]]

THEIRS: dict[str, tuple[dict[str, Any], LogitsProcessor]] = {
    "logit_bias": (
        {"logit_bias": BIAS}, SequenceBiasLogitsProcessor({(t,): b for t, b in BIAS.items()})
    ),
    "repetition_penalty": (
        {"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)
    ),
    "bad_words": ({"bad_words": WORDS}, NoBadWordsLogitsProcessor(WORDS)),
    "min_tokens": (
        {"min_tokens": 4}, MinNewTokensLengthLogitsProcessor(6, 4, sorted(END))
    ),
    "allowed_token_ids": (
        {"allowed_token_ids": [2, 9, 30]},
        PrefixConstrainedLogitsProcessor(lambda batch, ids: [2, 9, 30], 1),
    ),
}  # fmt: skip


def law(prompt: list[int], **fields: Any) -> TokenLaw:
    params = SamplingParams(temperature=0, **fields).resolved({}, seed=1)
    words: Any = params.bad_words
    return TokenLaw(
        params, prompt, V, "raw_logprobs", end_token_ids=END, bad_words=words
    )  # fmt: skip


def row(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=V).astype(np.float32) * 3


@pytest.mark.parametrize("name", THEIRS)
def test_equal_to_transformers(name: str) -> None:
    fields, theirs = THEIRS[name]
    for seed in range(30):
        rng = random.Random(seed)
        # Few tokens, so that sequences do recur.
        history = [rng.randint(1, 8) for _ in range(12)]
        start = 6 if name == "min_tokens" else rng.randint(1, 6)
        ours = law(history[:start], **fields)
        for length in range(start, 12):
            logits = row(100 * seed + length)
            before = logits.copy()
            expected = theirs(
                torch.tensor([history[:length]]), torch.from_numpy(logits.copy())[None]
            )[0]
            assert np.array_equal(ours._processed(logits, length), expected.numpy()), (seed, length)
            assert np.array_equal(logits, before)  # the caller's row is left alone
            ours.append(history[length])


def test_a_bad_word_longer_than_the_prompt_hides_no_shorter_one() -> None:
    ours = law([11, 12, 13], bad_words=[[11, 12, 13, 5], [20, 21, 22, 23, 24]])
    assert ours._processed(row(0), 3)[5] == -np.inf


def test_presence_and_frequency_count_the_output_only() -> None:
    ours = law([1, 1, 2], presence_penalty=0.5, frequency_penalty=0.25)
    for token in (3, 3, 4):
        ours.append(token)
    processed = ours._processed(np.zeros(V, dtype=np.float32), 6)
    assert processed[:6].tolist() == [0, 0, 0, -1.0, -0.75, 0]


def test_an_end_token_may_be_a_bad_word() -> None:
    """Unlike in transformers, which drops it from the list without a word."""
    assert law([1], bad_words=[[7]])._processed(row(0), 1)[7] == -np.inf


class Recorder:
    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert token_ids.dtype == torch.int64
        assert scores.dtype == torch.float32
        self.log.append((self.name, token_ids[0].tolist()))
        return scores + torch.arange(V) * 100


def test_user_processors_are_called_once_a_position_in_order() -> None:
    log: list[Any] = []
    ours = law([1, 2], logits_processors=[Recorder(log, "a"), Recorder(log, "b")])
    assert ours.choose(row(0), 2).token_id == V - 1
    ours.append(5)
    ours.choose(row(1), 3)
    assert log == [("a", [1, 2]), ("b", [1, 2]), ("a", [1, 2, 5]), ("b", [1, 2, 5])]


FAULTS = {
    "raised ValueError: no": lambda ids, scores: (_ for _ in ()).throw(ValueError("no")),
    "got NoneType": lambda ids, scores: None,
    "got shape (50,)": lambda ids, scores: scores[0],
    "NaN or +inf": lambda ids, scores: scores + torch.nan,
    "no token is left": lambda ids, scores: scores - torch.inf,
}


def test_a_row_that_the_model_spoiled_is_not_blamed_on_a_processor() -> None:
    ours = law([1], logits_processors=[lambda ids, scores: scores])
    with pytest.raises(ValueError, match="not finite") as caught:
        ours.choose(np.full(V, np.nan, dtype=np.float32), 1)
    assert not isinstance(caught.value, InvalidRequestError)


class BadClone:
    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, ids: Any, scores: Any) -> Any:
        return scores

    def clone(self) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize("result", [None, RuntimeError("no twin")])
def test_a_clone_that_is_none_is_refused_before_anything_runs(result: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"logits_processors: BadClone (was|raised)"):
        law([1], logits_processors=[BadClone(result)])


@pytest.mark.parametrize("message", FAULTS)
def test_a_processor_that_misbehaves_is_named(message: str) -> None:
    ours = law([1], logits_processors=[FAULTS[message]])
    with pytest.raises(InvalidRequestError, match="logits_processors") as caught:
        ours.choose(row(0), 1)
    assert message in str(caught.value)


def test_parameters_that_leave_no_token_are_named() -> None:
    keep = {"logits_processors": [lambda ids, scores: scores]}
    ours = law([1], allowed_token_ids=[3], bad_words=[[3]], **keep)
    with pytest.raises(InvalidRequestError, match="at position 1 after bad_words, allowed_t") as e:
        ours.choose(row(0), 1)
    assert e.value.field == "allowed_token_ids"  # not what comes after it


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {512: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [3, 512]}, "allowed_token_ids"),
        ({"bad_words": [[3, 512]]}, "bad_words"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"logprobs": 513}, "logprobs"),
        ({"prompt_logprobs": 513}, "prompt_logprobs"),
        ({"bad_words": ["the"]}, "bad_words"),
        ({"stop": ["the"]}, "stop"),
    ],
)
def test_what_this_model_cannot_do_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    llm = LLM(tiny_llama(), draft="none", num_pages=20)
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([1, 2], SamplingParams(max_tokens=2, **fields))
    assert caught.value.field == field


def test_bad_words_as_text_cover_the_word_with_and_without_a_space() -> None:
    tokenizer = tiny_tokenizer(512)
    llm = LLM(tiny_llama(), tokenizer, draft="none", num_pages=64)
    with_space, bare = tokenizer.encode(" the"), tokenizer.encode("the")
    assert len(with_space) == 1
    biased = {"logit_bias": {with_space[0]: 100.0}, "max_tokens": 5, "seed": 1}
    plain = llm.generate([5, 6], SamplingParams(**biased))[0]
    assert plain.token_ids == tuple(with_space * 5)
    free = llm.generate([5, 6], SamplingParams(bad_words=["the"], **biased))[0]
    assert with_space[0] not in free.token_ids
    spellings = llm.engine.tokenizer.encode_word("the")  # type: ignore[union-attr]
    assert spellings == [tuple(bare), tuple(with_space)]


def test_bad_words_that_are_whitespace_and_odd_ones() -> None:
    tokenizer = Tokenizer(tiny_tokenizer(512))
    assert tokenizer.encode_word("\n") == [tuple(tokenizer.encode("\n"))]
    assert tuple(tokenizer.encode(" ")) not in tokenizer.encode_word("\n")
    assert tuple(tokenizer.encode("\t x")) in tokenizer.encode_word("\t x")
    with pytest.raises(InvalidRequestError, match="bad_words"):
        tokenizer.encode_word("\ud800")


def test_ids_that_no_row_of_logits_has() -> None:
    """A tokenizer with added tokens, a config with an EOS past the vocabulary: nothing fails."""
    tokenizer = tiny_tokenizer(512)
    tokenizer.add_tokens(["zzqq"])
    llm = LLM(with_eos(tiny_llama(), [1, 600]), tokenizer, draft="none", num_pages=64)
    params = SamplingParams(bad_words=["zzqq"], min_tokens=4, max_tokens=6, seed=1)
    assert len(llm.generate([5, 6], params)[0].token_ids) >= 4


def test_cache_salt_keeps_prefixes_apart() -> None:
    llm = LLM(tiny_llama(), draft="none", num_pages=64)
    prompt = list(range(40))
    cached = [
        llm.generate(prompt, SamplingParams(max_tokens=2, cache_salt=salt))[0].stats
        for salt in (None, None, "a", "b", "a", None)
    ]
    assert [stats.num_cached_tokens for stats in cached] == [0, 32, 0, 0, 32, 32]
