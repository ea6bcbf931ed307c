"""Faults in log-probabilities: E1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec import SamplingParams, Speculation
from specdec.testing import reference_generate, script_model, tiny_tokenizer
from tests.faults.drafts import fault_drafts, speculations
from tests.faults.entries import OFF, Answer, Starter


def assert_logprobs_are_plains(
    model: PreTrainedModel, prompt: list[int], answer: Answer, num_top: int
) -> None:
    """One entry a token, in every piece, each within 1e-4 of transformers' at its position."""
    entries = answer.output.logprobs
    assert entries is not None
    assert len(entries) == len(answer.ids)
    assert all(num_ids == num_logprobs for _, num_ids, num_logprobs in answer.chunks)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer.ids])).logits[0, len(prompt) - 1 : -1]
    for entry, token, row in zip(entries, answer.ids, logits.log_softmax(-1), strict=True):
        assert entry.token_id == token
        assert abs(entry.logprob - float(row[token])) < 1e-4
        assert entry.rank == 1 + int((row > row[token]).sum())
        values, _ = row.topk(num_top)
        assert len(entry.top) == num_top
        for (top_id, logprob), value in zip(entry.top.items(), values, strict=True):
            assert abs(logprob - float(value)) < 1e-4
            assert abs(logprob - float(row[top_id])) < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_e1_one_logprob_a_token(start: Starter, tiny: PreTrainedModel, temperature: float) -> None:
    """Fewer or more entries than tokens: rows of the expanded logits were picked wrongly."""
    prompt = [5, 6, 7, 5, 6]
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=64, logprobs=2)
    said: dict[Any, list[int]] = {}
    drafts = fault_drafts(512, said, (4,))
    entry = start(tiny, draft=drafts)
    said[tuple(prompt)] = entry.ask_one(prompt, params, OFF).ids
    if temperature == 0.0:
        assert said[tuple(prompt)] == reference_generate(tiny, prompt, 64)
    for name, speculation in speculations(drafts).items():
        answer = entry.ask_one(prompt, params, speculation)
        assert answer.ids == said[tuple(prompt)], name
        assert_logprobs_are_plains(tiny, prompt, answer, 2)
        if name.startswith("self"):
            assert answer.output.stats.num_accepted_draft_tokens > 20, name


def test_e1_no_entries_past_a_stop_string(start: Starter) -> None:
    """Text was trimmed at the stop string, but ids and log-probabilities were not."""
    tokenizer = tiny_tokenizer()
    question = "make me laugh: "
    prompt = tokenizer.encode(question)
    script = tokenizer.encode("well: ha ha ha ha ha and so on")
    whole = tokenizer.encode("well: ha ha ha")
    assert script[: len(whole)] == whole
    model = script_model(script, len(prompt))
    drafts = fault_drafts(512, {tuple(prompt): script}, (4,))
    entry = start(model, tokenizer, draft=drafts)
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, stop=" ha ha ha")
    for name, speculation in speculations(drafts).items():
        answer = entry.ask_one(question, params, speculation)
        assert answer.ids == whole, name
        assert answer.output.text == "well:", name
        assert_logprobs_are_plains(model, prompt, answer, 2)


@pytest.mark.slow
@pytest.mark.smol
def test_e1_on_the_real_model(start: Starter, smol_path: Path) -> None:
    """E1 with the prompt of the recipe, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    question = "He laughed: ha ha ha ha ha ha ha. She laughed:"
    prompt = tokenizer(question)["input_ids"]
    entry = start(model, tokenizer, draft="ngram")
    stop = tokenizer.decode(reference_generate(model, prompt, 4)[1:4])
    for stops in ([], [stop]):
        params = SamplingParams(temperature=0.0, max_tokens=64, logprobs=2, stop=stops)
        plain = entry.ask_one(question, params, OFF)
        drafted = entry.ask_one(question, params, Speculation(mode="fixed", max_nodes=4))
        assert drafted.ids == plain.ids
        assert_logprobs_are_plains(model, prompt, plain, 2)
        assert_logprobs_are_plains(model, prompt, drafted, 2)
