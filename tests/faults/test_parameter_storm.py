"""Random mixes of parameters, answers, aborts and tiny pools: each answer is what it is alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from transformers import PreTrainedModel

from specdec import LLM, FinishReason, SamplingParams, Speculation
from specdec.admission import answer_seed
from specdec.engine import Engine
from specdec.output import RequestDelta
from specdec.testing import OracleDrafter, RandomDrafter, page_check, tiny_tokenizer, with_eos
from tests.exactness.parameters import combination

V = 512
SPECULATIONS = [
    Speculation(mode="off"),
    Speculation(),
    Speculation(mode="fixed", max_nodes=15, max_depth=8),
    Speculation(mode="fixed", max_nodes=200, max_depth=200),
]
Key = tuple[str, int]


@dataclass
class Said:
    """One answer, joined from its deltas."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    end: Any = None
    num_prompt_logprobs: int | None = None
    logprobs: list[float] = field(default_factory=list)

    def add(self, delta: RequestDelta) -> None:
        assert self.end is None, "a delta after the end"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += [entry.logprob for entry in delta.logprobs]
        if delta.prompt_logprobs is not None:
            assert self.num_prompt_logprobs is None, "prompt log-probabilities came twice"
            self.num_prompt_logprobs = len(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.end = (delta.finish_reason, delta.stop_reason, delta.error, delta.error_field)


@dataclass
class Asked:
    name: str
    prompt: list[int]
    fields: dict[str, Any]


def random_requests(rng: random.Random) -> list[Asked]:
    """Some that begin alike, with lengths around a page."""
    bases = [[rng.randrange(4, V) for _ in range(60)] for _ in range(2)]
    asked = []
    for number in range(rng.randint(2, 6)):
        prompt = rng.choice(bases)[: rng.choice([1, 2, 4, 15, 16, 17, 32, 33, 48])]
        fields = {"max_tokens": rng.choice([24, 30, 40]), **combination(rng.randrange(2**32), V)}
        asked.append(Asked(f"q{number}", prompt, {"seed": rng.randrange(2**64), **fields}))
    return asked


def alone(reference: Engine, request: Asked, index: int, room: int) -> Said:
    """The answer by itself: no speculation, one answer, its own seed."""
    fields = {**request.fields, "n": 1, "seed": answer_seed(request.fields["seed"], index)}
    if index:
        fields["prompt_logprobs"] = None
    fields["max_tokens"] = min(fields["max_tokens"], room - len(request.prompt))
    reference.add_request("r", request.prompt, SamplingParams(**fields), SPECULATIONS[0])
    said = Said()
    while reference.has_work:
        for delta in reference.step():
            said.add(delta)
    return said


class Storm:
    """One engine with few pages, and what is to come out of it."""

    def __init__(self, seed: int, model: PreTrainedModel) -> None:
        self.rng = random.Random(seed)
        self.room = 96
        page_size = self.rng.choice([1, 4, 8])
        most = self.rng.choice([3, 4, 8])
        self.oracle: dict[Any, list[int]] = {}
        drafts = ["ngram", OracleDrafter(self.oracle, V, (3, 2, 2), accuracy=0.9),
                  RandomDrafter(V)]  # fmt: skip
        self.engine = LLM(
            model, tiny_tokenizer(V), draft=drafts, generation_config="none",
            page_size=page_size, max_model_len=self.room,
            num_pages=self.room // page_size + self.rng.choice([0, 1, 2]),
            prefix_cache=self.rng.random() < 0.6, max_num_seqs=most,
            max_batch_tokens=max(most, self.rng.choice([8, 16, 48, 512])),
            max_chunk_tokens=self.rng.choice([1, 20, 128]),
        ).engine  # fmt: skip
        self.aborted: set[str] = set()

    def run(self, asked: list[Asked]) -> dict[Key, Said]:
        """Requests arrive, are preempted at will and sometimes aborted, until all have ended."""
        said: dict[Key, Said] = {}
        queue = list(asked)
        while queue or self.engine.has_work:
            deltas = []
            while queue and (self.rng.random() < 0.5 or not self.engine.has_work):
                request = queue.pop(0)
                params = SamplingParams(**request.fields)
                speculation = self.rng.choice(SPECULATIONS)
                self.engine.add_request(request.name, request.prompt, params, speculation)
            if self.rng.random() < 0.01:
                name = self.rng.choice(sorted(self.engine.request_ids))
                self.aborted.add(name)
                deltas += self.engine.abort(name)
            running = self.engine._scheduler.running
            if running and self.rng.random() < 0.05:
                self.engine._scheduler._preempt(self.rng.choice(running))
            deltas += self.engine.step()
            self.engine.check_integrity()
            for delta in deltas:
                said.setdefault((delta.request_id, delta.index), Said()).add(delta)
        return said


def check(seed: int, model: PreTrainedModel, reference: Engine) -> int:
    storm = Storm(seed, model)
    asked = random_requests(storm.rng)
    expected: dict[Key, Said] = {}
    for request in asked:
        for index in range(request.fields.get("n", 1)):
            answer = alone(reference, request, index, storm.room)
            expected[request.name, index] = answer
            own_seed = answer_seed(request.fields["seed"], index)
            storm.oracle[own_seed, tuple(request.prompt)] = answer.token_ids
    said = storm.run(asked)
    assert said.keys() == expected.keys()
    for key, answer in said.items():
        wanted = expected[key]
        if key[0] in storm.aborted and answer.end[0] is FinishReason.ABORT:
            assert answer.token_ids == wanted.token_ids[: len(answer.token_ids)], (seed, key)
            continue
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-3), (seed, key)
        answer.logprobs = wanted.logprobs
        assert answer == wanted, (seed, key)
    assert page_check(storm.engine) == 0
    return storm.engine.counters.num_accepted_draft_tokens


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 150), marks=pytest.mark.slow)], ids=len
)
def test_each_answer_is_what_it_is_alone(seeds: range, tiny: PreTrainedModel) -> None:
    model = with_eos(tiny, [1, 333])
    reference = LLM(
        model, tiny_tokenizer(V), draft="none", generation_config="none", num_pages=64,
        prefix_cache=False,
    ).engine  # fmt: skip
    accepted = [check(seed, model, reference) for seed in seeds]
    assert sum(accepted) > 10 * len(accepted)
