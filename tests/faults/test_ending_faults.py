"""Faults in how answers end and how their text arrives: C1, C2, C5, D1, D3, D5."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec import SamplingParams, Speculation
from specdec.output import FinishReason
from specdec.testing import (
    OracleDrafter,
    first_seen_positions,
    random_prompts,
    reference_generate,
    script_model,
    tiny_tokenizer,
    with_eos,
)
from tests.faults.drafts import fault_drafts, speculations
from tests.faults.entries import Answer, GenerateEntry, Starter

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def assert_counts_agree(answer: Answer) -> None:
    """Pieces, ids and statistics tell of the same tokens."""
    assert sum(count for _, count, _ in answer.chunks) == len(answer.ids)
    assert answer.output.stats.num_output_tokens == len(answer.ids)
    assert "".join(text for text, _, _ in answer.chunks) == answer.output.text


def test_c1_eos_inside_an_accepted_run(start: Starter, tiny: PreTrainedModel) -> None:
    """Generation went on past an EOS that was accepted in the middle of a block."""
    prompt = [20, 21, 22]
    plain = reference_generate(tiny, prompt, 30)
    drafts = fault_drafts(512, {tuple(prompt): plain}, (8,))
    for position in first_seen_positions(plain, 11):
        entry = start(with_eos(tiny, plain[position]), tiny_tokenizer(), draft=drafts)
        for name, speculation in speculations(drafts).items():
            answer = entry.ask_one(prompt, greedy(30), speculation)
            assert answer.ids == plain[: position + 1], (name, position)
            assert answer.output.finish_reason is STOP, (name, position)
            assert answer.output.stop_reason is None, (name, position)
            assert_counts_agree(answer)


def prompt_with_readable_tokens(model: PreTrainedModel, tokenizer: Any) -> tuple[list[int], Any]:
    """A prompt whose greedy tokens 3, 5 and 6 are readable and new in the text (T4)."""

    def is_readable(plain: Sequence[int], count: int) -> bool:
        piece = tokenizer.decode([plain[count - 1]])
        before = tokenizer.decode(plain[: count - 1])
        whole = tokenizer.decode(plain[:count])
        return bool(piece.isprintable() and piece and piece not in before and "�" not in piece
                    and whole == before + piece and whole.count(piece) == 1)  # fmt: skip

    for prompt in random_prompts(400, longest=8, seed=1):
        plain = reference_generate(model, prompt, 8)
        if len(set(plain)) == 8 and all(is_readable(plain, count) for count in (3, 5, 6)):
            return prompt, plain
    raise AssertionError("no prompt fits; the tiny model has changed")


@pytest.mark.parametrize("kind", ["token", "string"])
def test_c2_stop_beats_length(start: Starter, tiny: PreTrainedModel, kind: str) -> None:
    """A stop inside the budget was missed when the same step also crossed max_tokens."""
    tokenizer = tiny_tokenizer()
    prompt, plain = prompt_with_readable_tokens(tiny, tokenizer)
    drafts = fault_drafts(512, {tuple(prompt): plain}, (6,))
    entry = start(tiny, tokenizer, draft=drafts)
    for count, reason, length in ((3, STOP, 3), (6, LENGTH, 5), (5, STOP, 5)):
        token = plain[count - 1]
        piece = tokenizer.decode([token])
        ending = {"stop_token_ids": [token]} if kind == "token" else {"stop": piece}
        for name, speculation in speculations(drafts).items():
            answer = entry.ask_one(prompt, greedy(5, **ending), speculation)
            assert answer.ids == plain[:length], (name, count)
            assert answer.output.finish_reason is reason, (name, count)
            text = tokenizer.decode(plain[: length - 1 if reason is STOP else length])
            assert answer.output.text == text, (name, count)
            if reason is STOP:
                assert answer.output.stop_reason == (token if kind == "token" else piece)
            assert_counts_agree(answer)


def test_c5_never_more_than_max_tokens(start: Starter, tiny: PreTrainedModel) -> None:
    """Prompt look-up returned more than max_new_tokens."""
    half = random_prompts(1, longest=20, seed=9)[0]
    first = reference_generate(tiny, half, 12)
    prompt = [*half, *first, *half]  # PASTE: the answer has been seen once
    plain = reference_generate(tiny, prompt, 16)
    drafts = fault_drafts(512, {tuple(prompt): plain}, (3, 8))
    entry = start(tiny, tiny_tokenizer(), draft=drafts)
    for name, speculation in speculations(drafts).items():
        for max_tokens in range(1, 11):
            answer = entry.ask_one(prompt, greedy(max_tokens), speculation)
            assert answer.ids == plain[:max_tokens], (name, max_tokens)
            assert answer.output.finish_reason is LENGTH, (name, max_tokens)
            assert_counts_agree(answer)


HARD_TEXT = "삼겹살 👩‍👩‍👧 世界 ďábelské 𝄞"


def assert_streams_whole_characters(answer: Answer, tokenizer: Any) -> None:
    """D1: pieces joined are one decode of all ids, and no piece invents a U+FFFD."""
    whole = tokenizer.decode(answer.ids, skip_special_tokens=True)
    assert answer.output.text == whole
    if "�" not in whole:
        assert not [text for text, _, _ in answer.chunks if "�" in text]
    else:
        pieces = "".join(text for text, _, _ in answer.chunks)
        assert pieces.count("�") == whole.count("�")


def test_d1_characters_of_several_tokens(start: Starter) -> None:
    """Streamed Korean lost syllables, each replaced by U+FFFD."""
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.encode("say it: ")
    script = tokenizer.encode(HARD_TEXT)
    assert len(script) > 40
    drafts = fault_drafts(512, {tuple(prompt): script}, (1, 5), (2, 2))
    entry = start(script_model(script, len(prompt)), tokenizer, draft=drafts)
    for name, speculation in speculations(drafts).items():
        for max_tokens in (*range(1, 12), 20, 21, 34, 35, len(script)):
            answer = entry.ask_one("say it: ", greedy(max_tokens), speculation)
            assert answer.ids == script[:max_tokens], (name, max_tokens)
            assert_streams_whole_characters(answer, tokenizer)
        assert answer.output.text == HARD_TEXT, name


def test_d1_random_bytes(start: Starter, tiny: PreTrainedModel) -> None:
    """As D1, with ids that are no valid UTF-8 at all: the whole decode is still what arrives."""
    tokenizer = tiny_tokenizer()
    prompts = random_prompts(8, longest=12, seed=2)
    params = [SamplingParams(temperature=1.5, seed=i, max_tokens=40) for i in range(8)]
    entry = start(tiny, tokenizer, draft="ngram")
    for answer in entry.ask(prompts, params, Speculation(mode="fixed", max_nodes=8)):
        assert answer.output.text == tokenizer.decode(answer.ids, skip_special_tokens=True)
        assert_counts_agree(answer)


@pytest.mark.slow
@pytest.mark.smol
def test_d1_on_the_real_model(start: Starter, smol_path: Path) -> None:
    """D1 with the prompt of the recipe and every max_tokens from 1 to 40."""
    model = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    prompt = f"Repeat exactly: {HARD_TEXT}\n{HARD_TEXT}\n"
    entry = start(model, tokenizer, draft="ngram")
    plain = entry.ask_one(prompt, greedy(40, ignore_eos=True))
    for nodes in (0, 1, 5):
        speculation = Speculation(mode="fixed", max_nodes=nodes)
        for max_tokens in range(1, 41):
            answer = entry.ask_one(prompt, greedy(max_tokens, ignore_eos=True), speculation)
            assert answer.ids == plain.ids[:max_tokens]
            assert_streams_whole_characters(answer, tokenizer)


@pytest.mark.parametrize("ending", ["eos", "max_tokens", "second stop"])
def test_d3_held_back_text_is_flushed(start: Starter, ending: str) -> None:
    """Text held back as a possible stop prefix was lost at the end of a stream."""
    tokenizer = tiny_tokenizer()
    question = "Repeat exactly the following text: UNO DUE TRE"
    prompt = tokenizer.encode(question)
    said = tokenizer.encode("UNO DUE TRE")
    tails = {"eos": [1], "max_tokens": tokenizer.encode("\nAA"), "second stop": [75, 76]}
    script = [*said, *tails[ending], 300, 301]
    stops = ["TRE\nAAAAAAAA", tokenizer.decode([75, 76])]
    max_tokens = len(said) if ending == "max_tokens" else 60
    drafts = fault_drafts(512, {tuple(prompt): script}, (6,))
    model = with_eos(script_model(script, len(prompt)), 1)
    entry = start(model, tokenizer, draft=drafts)
    for name, speculation in speculations(drafts).items():
        answer = entry.ask_one(question, greedy(max_tokens, stop=stops), speculation)
        assert answer.output.text == "UNO DUE TRE", name
        assert answer.output.finish_reason is (LENGTH if ending == "max_tokens" else STOP), name
        assert_counts_agree(answer)


def test_d5_no_words_are_missing_in_streams(tiny: PreTrainedModel, start: Starter) -> None:
    """When one step yielded several tokens only the last was streamed."""
    tokenizer = tiny_tokenizer()
    prompts = random_prompts(20, longest=20, seed=4)
    plain = {tuple(p): reference_generate(tiny, p, 30, eos_token_id=1) for p in prompts}
    entry = start(tiny, tokenizer, draft=OracleDrafter(plain, 512, 5))
    speculation = Speculation(mode="fixed", max_nodes=8)
    for answer, prompt in zip(
        entry.ask(prompts * 5, greedy(30), speculation), prompts * 5, strict=True
    ):
        assert answer.ids == plain[tuple(prompt)]
        assert answer.output.text == tokenizer.decode(answer.ids, skip_special_tokens=True)
        assert_counts_agree(answer)
    if isinstance(entry, GenerateEntry):
        client = entry.client

        def read_slowly(prompt: list[int]) -> None:
            ids: list[int] = []
            for delta in client.generate(prompt, greedy(30), speculation):
                ids += delta.token_ids
                time.sleep(0.05)
            assert ids == plain[tuple(prompt)]

        with ThreadPoolExecutor(5) as pool:
            list(pool.map(read_slowly, prompts))
