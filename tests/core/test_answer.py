"""Text that streams in pieces is the text decoded at once, and stops cut everything together."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specdec import FinishReason, SamplingParams
from specdec.sampling.answer import Answer, StopScanner
from specdec.testing import tiny_tokenizer
from specdec.tokenizer import Tokenizer

TEXT = "naïve 삼겹살 👩‍👩‍👧 世界 ďábelské 𝄞 end"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


def answer(tokenizer: Tokenizer | None, eos: frozenset[int] = frozenset(), **params: Any) -> Answer:
    max_tokens = params.pop("max_tokens", 1000)
    return Answer(SamplingParams(**params).resolved({}, 0), eos, tokenizer, max_tokens)


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.hf(text, add_special_tokens=False)["input_ids"])


def run(growing: Answer, ids: list[int]) -> tuple[list[int], str, list[str]]:
    """Feed ids until the answer ends; returns ids, joined text and the pieces."""
    pieces, got = [], []
    for token in ids:
        done = growing.append(token, None)
        new_ids, piece, _ = growing.take()
        got += new_ids
        pieces.append(piece)
        if done:
            break
    return got, "".join(pieces), pieces


def test_every_cut_of_multibyte_text_streams_as_it_decodes(tokenizer: Tokenizer) -> None:
    ids = plain_ids(tokenizer, TEXT)
    for count in range(1, len(ids) + 1):
        got, text, pieces = run(answer(tokenizer, max_tokens=count), ids)
        whole = tokenizer.decode(ids[:count])
        assert (got, text) == (ids[:count], whole)
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    "stops", [["end"], ["n", "end"], ["世界 ď", "𝄞 e"], ["zzz"], [" end", "d"]]
)
def test_text_ends_before_the_first_stop_and_ids_at_its_last_token(
    tokenizer: Tokenizer, stops: list[str]
) -> None:
    ids = plain_ids(tokenizer, TEXT)
    growing = answer(tokenizer, stop=stops, max_tokens=len(ids))
    got, text, _ = run(growing, ids)
    starts = [TEXT.find(stop) for stop in stops if stop in TEXT]
    if not starts:
        assert (text, growing.finish_reason) == (TEXT, FinishReason.LENGTH)
        return
    assert text == TEXT[: min(starts)]
    assert growing.finish_reason is FinishReason.STOP
    assert growing.stop_reason in stops
    # The stop is in the text of these ids and not in that of one id fewer.
    assert any(stop in tokenizer.decode(got) for stop in stops)
    assert not any(stop in tokenizer.decode(got[:-1]) for stop in stops)


def test_held_back_text_is_given_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = plain_ids(tokenizer, "UNO DUE TRE")
    growing = answer(tokenizer, stop=["TRE\nAAAAAAAA"], max_tokens=len(ids))
    assert run(growing, ids)[1] == "UNO DUE TRE"
    assert growing.finish_reason is FinishReason.LENGTH


def test_eos_and_stop_tokens_end_without_text(tokenizer: Tokenizer) -> None:
    ids = plain_ids(tokenizer, "abc")
    eos = frozenset({ids[-1]})
    growing = answer(tokenizer, eos)
    assert run(growing, [*ids, 9])[:2] == (ids, tokenizer.decode(ids[:-1]))
    assert (growing.finish_reason, growing.stop_reason) == (FinishReason.STOP, None)
    growing = answer(tokenizer, eos, ignore_eos=True, max_tokens=len(ids))
    assert run(growing, ids)[1] == "abc"
    assert growing.finish_reason is FinishReason.LENGTH
    growing = answer(tokenizer, stop_token_ids=[ids[-1]], max_tokens=len(ids))
    run(growing, ids)
    assert (growing.finish_reason, growing.stop_reason) == (FinishReason.STOP, ids[-1])


def test_stop_beats_length_at_the_same_token(tokenizer: Tokenizer) -> None:
    ids = plain_ids(tokenizer, "abc")
    growing = answer(tokenizer, stop=["bc"], max_tokens=len(ids))
    run(growing, ids)
    assert growing.finish_reason is FinishReason.STOP


def test_without_a_tokenizer_only_ids_come() -> None:
    growing = answer(None, max_tokens=2)
    assert run(growing, [5, 6, 7])[:2] == ([5, 6], "")


def test_scanner_finds_what_find_finds_however_the_text_is_cut() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 12)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(2)]
        scanner, given, hit, position = StopScanner(stops), "", None, 0
        while position < len(text) and hit is None:
            step = rng.randrange(1, 4)
            piece, hit = scanner.push(text[position : position + step])
            given += piece
            position += step
        if hit is None:
            assert not any(stop in text for stop in stops)
            assert given + scanner.flush() == text
        else:
            assert (
                given == text[: min(text.find(stop) for stop in stops if stop in text[:position])]
            )
            assert not any(stop in given for stop in stops)
