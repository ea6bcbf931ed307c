"""Prompts with next to nothing in them, beside streams that run (fault Q11)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specdec import LLM, SamplingParams, Speculation
from specdec.errors import InvalidRequestError
from specdec.rpc.client import Client
from specdec.testing import (
    page_check,
    random_prompts,
    reference_generate,
    tiny_llama,
    tiny_tokenizer,
    with_eos,
)
from tests.faults.drafts import fault_drafts, speculations
from tests.rpc.running import RunningServer

BOS, EOS = 0, 1
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
OTHERS = random_prompts(3, seed=5)
SHORT: dict[str, tuple[Any, list[int] | None]] = {
    "empty text": ("", [BOS]),
    "one space": (" ", None),
    "BOS": ([BOS], [BOS]),
    "EOS": ([EOS], [EOS]),
    "one id": ([77], [77]),
}
"""Prompts, and the ids that they are known to be. The tokenizer puts a BOS in front of text."""


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[int]]:
    """What transformers says, by prompt."""
    model = with_eos(tiny_llama(), EOS)
    tokenizer = tiny_tokenizer(add_bos=True)
    prompts = [*OTHERS, [BOS], [EOS], [77], tokenizer(" ")["input_ids"]]
    return {tuple(ids): reference_generate(model, ids, GREEDY.max_tokens or 0) for ids in prompts}


@pytest.fixture(scope="module")
def drafts(expected: dict[tuple[int, ...], list[int]]) -> list[Any]:
    return fault_drafts(512, expected, (1, 5))


@pytest.fixture(scope="module")
def running(drafts: list[Any]) -> Iterator[RunningServer]:
    def create() -> Any:
        model = with_eos(tiny_llama(), EOS)
        return LLM(model, tiny_tokenizer(add_bos=True), draft=drafts, num_pages=256).engine

    with RunningServer(create) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client


def test_q11_almost_empty_prompts_leave_the_others_alone(
    running: RunningServer,
    client: Client,
    drafts: list[Any],
    expected: dict[tuple[int, ...], list[int]],
) -> None:
    def ask(prompt: Any, speculation: Speculation) -> tuple[list[int], tuple[int, ...]]:
        answer = client.complete(prompt, GREEDY, speculation, timeout=60)
        return list(answer.token_ids), answer.prompt_token_ids

    with ThreadPoolExecutor(9) as pool:
        for name, speculation in speculations(drafts).items():
            others = [pool.submit(ask, prompt, speculation) for prompt in OTHERS]
            asked = {
                label: pool.submit(ask, prompt, speculation) for label, (prompt, _) in SHORT.items()
            }
            with pytest.raises(InvalidRequestError) as caught:
                client.complete([], GREEDY, speculation)
            assert caught.value.field == "prompt", name
            for label, future in asked.items():
                token_ids, prompt_token_ids = future.result()
                assert token_ids == expected[prompt_token_ids], (name, label)
                known = SHORT[label][1]
                assert known is None or prompt_token_ids == tuple(known), (name, label)
            for other in others:
                token_ids, prompt_token_ids = other.result()
                assert token_ids == expected[prompt_token_ids], name
    assert running.engine(page_check) == 0


def test_q11_an_empty_text_without_a_bos_is_refused() -> None:
    def create() -> Any:
        return LLM(tiny_llama(), tiny_tokenizer(), num_pages=64).engine

    with RunningServer(create) as running, Client(running.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.complete("", GREEDY)
        assert caught.value.field == "prompt"
        empty_turn = client.complete([{"role": "user", "content": ""}], GREEDY)
        assert len(empty_turn.token_ids) == 12, "the template has tokens of its own"
