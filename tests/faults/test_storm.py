"""Five hundred requests of every kind in a pool that is too small: nothing is lost."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams, Speculation
from specdec.output import FinishReason, RequestDelta
from specdec.testing import (
    NoisyDrafter,
    RandomDrafter,
    page_check,
    random_prompts,
    tiny_tokenizer,
)
from specdec_drafts.base import Drafter

NUM_REQUESTS = 500


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    fields = {
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "max_tokens": rng.randint(1, 60),
        "seed": seed,
        "stop": rng.choice([None, "e", "qu"]),
        "stop_token_ids": rng.choice([None, [rng.randrange(512) for _ in range(20)]]),
        "repetition_penalty": rng.choice([None, 1.2]),
        "top_p": rng.choice([None, 0.9]),
        "logprobs": rng.choice([None, 0, 3]),
    }
    return SamplingParams(**fields)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_storm(tiny: PreTrainedModel, prefix_cache: bool) -> None:
    rng = random.Random(17 + prefix_cache)
    drafts: list[str | Drafter] = [
        "ngram", RandomDrafter(512), NoisyDrafter(tiny, (2, 1, 1), name="noisy"),
    ]  # fmt: skip
    # A full house wants about 16 * 60 slots: pages run out again and again.
    llm = LLM(tiny, tiny_tokenizer(), draft=drafts, num_pages=64, page_size=4, max_num_seqs=16,
              max_batch_tokens=96, prefix_cache=prefix_cache)  # fmt: skip
    engine = llm.engine
    shared = random_prompts(1, longest=40, seed=5)[0]
    prompts = random_prompts(NUM_REQUESTS, longest=50, seed=6)
    prompts = [shared[:30] + p[:30] if rng.random() < 0.3 else p for p in prompts]
    params = [random_params(rng, seed) for seed in range(NUM_REQUESTS)]
    speculations = [
        rng.choice([
            Speculation(mode="off"),
            Speculation(),
            Speculation(mode="fixed", max_nodes=12, drafts=["ngram"]),
            Speculation(mode="fixed", max_nodes=8, max_depth=4, drafts=["random"]),
            Speculation(mode="fixed", max_nodes=6, drafts=["noisy", "random"]),
        ])
        for _ in range(NUM_REQUESTS)
    ]  # fmt: skip
    deltas: dict[str, list[RequestDelta]] = {}
    submitted = 0
    while submitted < NUM_REQUESTS or engine.has_work:
        for _ in range(rng.randrange(4)):
            if submitted < NUM_REQUESTS:
                name = f"r{submitted}"
                engine.add_request(
                    name, prompts[submitted], params[submitted], speculations[submitted]
                )
                deltas[name] = []
                submitted += 1
        live = [n for n, parts in deltas.items() if not parts or parts[-1].finish_reason is None]
        if live and rng.random() < 0.1:
            (last,) = engine.abort(rng.choice(live))
            assert last.finish_reason is FinishReason.ABORT
            deltas[last.request_id].append(last)
            page_check(engine)
        for delta in engine.step():
            assert delta.error is None, delta.error
            deltas[delta.request_id].append(delta)
        engine.check_integrity()

    assert page_check(engine) == 0
    counters = engine.counters
    assert counters.num_finished + counters.num_aborted == NUM_REQUESTS
    assert counters.num_failed == counters.num_running == counters.num_waiting == 0
    ends = {name: parts[-1] for name, parts in deltas.items()}
    assert all(
        sum(part.finish_reason is not None for part in parts) == 1 for parts in deltas.values()
    )
    num_preemptions = sum(end.stats.num_preemptions for end in ends.values())
    assert num_preemptions > 20, "the pool was not short of pages"
    assert {end.finish_reason for end in ends.values()} == set(FinishReason)
    assert_same_as_alone(tiny, deltas, prompts, params)


def assert_same_as_alone(
    tiny: PreTrainedModel,
    deltas: dict[str, list[RequestDelta]],
    prompts: list[list[int]],
    params: list[SamplingParams],
) -> None:
    """Every seventh request, run alone without speculation; an aborted one is a beginning of it."""
    alone = LLM(tiny, tiny_tokenizer(), draft="none", num_pages=96, page_size=4)
    for index in range(0, NUM_REQUESTS, 7):
        parts = deltas[f"r{index}"]
        ids = tuple(token for part in parts for token in part.token_ids)
        text = "".join(part.text for part in parts)
        expected = alone.generate(prompts[index], params[index])[0]
        if parts[-1].finish_reason is FinishReason.ABORT:
            assert expected.token_ids[: len(ids)] == ids
            continue
        assert ids == expected.token_ids, index
        assert text == expected.text, index
        assert parts[-1].finish_reason is expected.finish_reason, index
