"""Faults in pages, the prefix cache and at the end of the context: H1, I1, J1."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import PreTrainedModel

from specdec import SamplingParams, Speculation
from specdec.output import FinishReason
from specdec.testing import (
    OracleDrafter,
    RandomDrafter,
    page_check,
    random_prompts,
    reference_generate,
    tiny_gpt2,
    tiny_llama,
    tiny_tokenizer,
)
from tests.faults.drafts import fault_drafts, speculations
from tests.faults.entries import OFF, Entry, Starter


def used_pages(entry: Entry) -> int:
    return entry.engine(page_check)


def random_ending(rng: random.Random, seed: int) -> SamplingParams:
    """Sampled, and ended by a stop token, a stop string or the length."""
    ending = rng.choice([
        {"stop_token_ids": [rng.randrange(512) for _ in range(40)]},
        {"stop": [rng.choice("etaoin") for _ in range(3)]},
        {"max_tokens": rng.randint(1, 12)},
    ])  # fmt: skip
    fields: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 30}
    return SamplingParams(**(fields | ending))


@pytest.mark.parametrize("shape", [5, (4, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_h1_no_page_is_left_behind(
    start: Starter, tiny: PreTrainedModel, page_size: int, shape: int | tuple[int, ...]
) -> None:
    """Pages reserved for drafts were not in the request's counters: two leaked per request."""
    if start.kind == "Generate" and (page_size, shape) not in ((1, 5), (16, (4, 4))):
        pytest.skip("two of the six through the server are enough: pages are the engine's")
    tokenizer = tiny_tokenizer()
    rng = random.Random(page_size)
    prompts = random_prompts(200, longest=70, seed=page_size)
    params = [random_ending(rng, seed) for seed in range(len(prompts))]
    said: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    drafts = [OracleDrafter(said, 512, shape, accuracy=0.7), RandomDrafter(512, shape)]
    pages = -(-16 * 140 // page_size)
    entry = start(tiny, tokenizer, draft=drafts, page_size=page_size, num_pages=pages,
                  prefix_cache=False)  # fmt: skip
    start_value = used_pages(entry)
    plain = entry.ask(prompts, params)
    said |= {(a.output.seed, a.output.prompt_token_ids): a.ids for a in plain}
    reasons = [(a.output.finish_reason, type(a.output.stop_reason)) for a in plain]
    assert len(set(reasons)) >= 3, "every kind of ending must occur"
    assert used_pages(entry) == start_value
    for name, speculation in speculations(drafts).items():
        if name == "off":
            continue  # that was the run above
        answers = entry.ask(prompts, params, speculation)
        assert [a.ids for a in answers] == [a.ids for a in plain], name
        assert used_pages(entry) == start_value, name


def test_i1_prefix_shared_within_one_step(start: Starter) -> None:
    """Page hashes were published before their KV was written: old KV was read for a shared prefix,
    and acceptance fell over time.
    """
    model = tiny_llama(max_positions=1024, seed=2)
    prompt = random_prompts(1, longest=600, seed=1)[0]
    prompt = (prompt * 600)[:600]
    longer = prompt + random_prompts(1, longest=40, seed=8)[0]
    plain = {tuple(p): reference_generate(model, p, 24) for p in (prompt, longer)}
    drafts = fault_drafts(512, plain, (5,))
    entry = start(model, draft=drafts, page_size=16)
    speculation = speculations(drafts)["noisy-5"]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    lengths = []
    for round_number in range(20):
        answers = entry.ask([prompt, prompt, longer], params, speculation)
        for answer, ids in zip(answers, (prompt, prompt, longer), strict=True):
            assert answer.ids == plain[tuple(ids)], round_number
        lengths.append(sum(a.output.stats.acceptance_length for a in answers) / 3)
        if round_number > 0:
            assert min(a.output.stats.num_cached_tokens for a in answers) >= 592
    assert abs(lengths[19] / lengths[0] - 1) < 0.1
    for name, other in speculations(drafts).items():
        for answer in entry.ask([prompt, longer], params, other):
            assert answer.ids == plain[answer.output.prompt_token_ids], name
    assert used_pages(entry) == 0


# Learned positions fail at once beyond the table; rotary ones merely go on.
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_j1_drafts_stop_at_the_end_of_the_context(start: Starter, make: Any) -> None:
    """Near the context end the look-ahead ran past the cache."""
    model = make(max_positions=64)
    prompts = [(random_prompts(1, seed=n)[0] * 64)[:n] for n in range(64 - 10, 64)]
    plain = {tuple(p): reference_generate(model, p, 64 - len(p)) for p in prompts}
    drafts = fault_drafts(512, plain, (1, 5, 8))
    entry = start(model, draft=drafts)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    for name, speculation in speculations(drafts).items():
        for prompt, answer in zip(prompts, entry.ask(prompts, params, speculation), strict=True):
            assert answer.ids == plain[tuple(prompt)], (name, len(prompt))
            assert answer.output.finish_reason is FinishReason.LENGTH, (name, len(prompt))
    assert used_pages(entry) == 0


def test_j1_in_a_pool_that_holds_one_context(start: Starter) -> None:
    """J1 with no page to spare: trees shrink to what is left and the answer stays the same."""
    model = tiny_llama(max_positions=64)
    prompt = random_prompts(1, longest=40, seed=3)[0]
    plain = reference_generate(model, prompt, 64 - len(prompt))
    drafts = fault_drafts(512, {tuple(prompt): plain}, (5,))
    entry = start(model, draft=drafts, num_pages=4, page_size=16)
    params = SamplingParams(temperature=0.0)
    for speculation in (OFF, *speculations(drafts).values(), Speculation()):
        assert entry.ask_one(prompt, params, speculation).ids == plain
