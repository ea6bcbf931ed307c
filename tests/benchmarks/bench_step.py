"""One engine step: all running requests, from planning to their deltas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from specdec import LLM, SamplingParams, Speculation

PROMPT = [5 + 7 * i % 500 for i in range(64)]
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=160)
SPECULATIONS = {
    "plain": Speculation(mode="off"),
    "tree20": Speculation(mode="fixed", max_nodes=20),
}


@pytest.fixture
def idle_llm(llm: LLM) -> Iterator[LLM]:
    yield llm
    for number in range(16):
        llm.engine.abort(str(number))
    assert llm.engine.counters.num_used_pages == 0


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("speculation", SPECULATIONS)
def bench_decode_step(
    benchmark: BenchmarkFixture, idle_llm: LLM, speculation: str, num_requests: int
) -> None:
    """A step in which every request decodes."""
    engine = idle_llm.engine

    def restart_when_finished() -> None:
        if engine.counters.num_running == num_requests:
            return
        for number in range(num_requests):
            engine.abort(str(number))
            engine.add_request(str(number), PROMPT, PARAMS, SPECULATIONS[speculation])
        while len(engine.step()) < num_requests:
            pass

    deltas = benchmark.pedantic(
        engine.step, setup=restart_when_finished, rounds=40, warmup_rounds=5
    )
    assert len(deltas) == num_requests


def bench_prompt_step(benchmark: BenchmarkFixture, idle_llm: LLM) -> None:
    """A step that computes a prompt of 64 tokens and emits its first token."""
    engine = idle_llm.engine

    def start_afresh() -> None:
        engine.abort("0")
        engine.reset_state()
        engine.add_request("0", PROMPT, PARAMS, SPECULATIONS["plain"])

    (delta,) = benchmark.pedantic(engine.step, setup=start_afresh, rounds=20, warmup_rounds=2)
    assert len(delta.token_ids) == 1
