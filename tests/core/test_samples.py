"""Several answers to one prompt: their seeds, their pages, their ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.admission import answer_seed
from specdec.errors import InvalidRequestError
from specdec.output import RequestDelta
from specdec.testing import RandomDrafter, page_check, tiny_llama


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return tiny_llama()


def make(tiny: PreTrainedModel, **config: Any) -> LLM:
    return LLM(tiny, draft=["ngram", RandomDrafter(512)], **{"num_pages": 200, **config})


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_each_answer_is_what_its_seed_says_alone(prefix_cache: bool, tiny: PreTrainedModel) -> None:
    llm = make(tiny, prefix_cache=prefix_cache)
    # Lengths around a page (16): the page in which the answers part is full, new or in use.
    prompts = [[(3 * i + j) % 500 for j in range(length)] for i, length in
               enumerate((1, 15, 16, 17, 31, 32, 33, 48))]  # fmt: skip
    for turn in range(2):  # the second time, prompts are cached
        outputs = llm.generate(prompts, SamplingParams(n=3, seed=5, max_tokens=20))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert [answer.index for answer in output.outputs] == [0, 1, 2]
            assert [answer.seed for answer in output.outputs] == [
                answer_seed(5, i) for i in range(3)
            ]
            for answer in output.outputs:
                assert answer.request_id == output.request_id
                alone = llm.generate(prompt, SamplingParams(seed=answer.seed, max_tokens=20))[0]
                assert answer.token_ids == alone.token_ids, (turn, len(prompt), answer.index)
            assert len({answer.token_ids for answer in output.outputs}) == 3
    assert page_check(llm.engine) == 0


def test_answer_zero_is_what_one_answer_would_be(tiny: PreTrainedModel) -> None:
    assert answer_seed(2**64 - 1, 0) == 2**64 - 1
    llm = make(tiny)
    one = llm.generate([5, 6, 7], SamplingParams(seed=3, max_tokens=12))[0]
    many = llm.generate([5, 6, 7], SamplingParams(seed=3, max_tokens=12, n=4))[0]
    assert many.token_ids == one.token_ids
    assert one.outputs == (one,)


def test_the_pages_of_the_prompt_are_shared(tiny: PreTrainedModel) -> None:
    engine = make(tiny, prefix_cache=False).engine
    engine.add_request("a", list(range(40)), SamplingParams(n=3, max_tokens=10, ignore_eos=True))
    while engine.counters.num_running < 3:
        engine.step()
        engine.check_integrity()
    owners = list(engine.page_owners().values())
    assert len(owners) == 3
    assert len({tuple(pages[:2]) for pages in owners}) == 1
    assert len({pages[2] for pages in owners}) == 3  # slots 32 .. 39 and the answer


def drain(llm: LLM) -> list[RequestDelta]:
    deltas = []
    while llm.engine.has_work:
        deltas += llm.engine.step()
        llm.engine.check_integrity()
    return deltas


def test_few_pages_and_many_answers(tiny: PreTrainedModel) -> None:
    """Preemption of leaders and siblings alike changes nothing."""
    prompts = [[(7 * i + j) % 500 for j in range(20 + i)] for i in range(5)]
    wide = make(tiny)
    tight = make(tiny, num_pages=9, max_model_len=80)
    params = SamplingParams(n=4, seed=1, max_tokens=40)
    expected = [
        [answer.token_ids for answer in output.outputs] for output in wide.generate(prompts, params)
    ]
    outputs = tight.generate(prompts, params)
    assert tight.engine.counters.num_preemptions > 3
    assert [[answer.token_ids for answer in output.outputs] for output in outputs] == expected
    assert page_check(tight.engine) == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_leaders_and_siblings_resume_wherever_they_were(
    prefix_cache: bool, tiny: PreTrainedModel
) -> None:
    """Preempted at any step, the prompt half computed or the answer half said."""
    prompts = [[(7 * i + j) % 500 for j in range(50 + i)] for i in range(3)]
    params = SamplingParams(n=3, seed=1, max_tokens=30, ignore_eos=True, prompt_logprobs=1)
    expected = make(tiny).generate(prompts, params)
    engine = make(tiny, prefix_cache=prefix_cache, max_batch_tokens=24).engine
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    rng, deltas, preempted = random.Random(1), [], set()
    while engine.has_work:
        if engine.counters.num_running and rng.random() < 0.2:
            victim = rng.choice(engine._scheduler.running)
            preempted.add((victim.index > 0, not victim.answer.token_ids))
            engine._scheduler._preempt(victim)
        deltas += engine.step()
        engine.check_integrity()
    assert preempted == {(False, True), (False, False), (True, False)}
    for index, output in enumerate(expected):
        for answer in output.outputs:
            mine = [d for d in deltas if (d.request_id, d.index) == (str(index), answer.index)]
            assert tuple(t for d in mine for t in d.token_ids) == answer.token_ids
        entries = [d.prompt_logprobs for d in deltas if d.request_id == str(index)]
        (entries,) = [found for found in entries if found is not None]
        values = [entry.logprob for entry in entries if entry is not None]
        wanted = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
        assert values == pytest.approx(wanted, abs=1e-4)
    assert page_check(engine) == 0


def test_waiting_siblings_hold_up_nobody() -> None:
    """A long prompt that takes few rows a step leaves the others to whoever comes next."""
    engine = make(tiny_llama(max_positions=2048)).engine
    long = [j % 500 for j in range(1500)]
    engine.add_request("long", long, SamplingParams(n=3, prompt_logprobs=0, max_tokens=2))
    engine.add_request("short", [1, 2, 3], SamplingParams(max_tokens=2))
    assert "short" in {delta.request_id for delta in engine.step()}


def test_abort_ends_all_answers(tiny: PreTrainedModel) -> None:
    llm = make(tiny)
    params = SamplingParams(n=3, max_tokens=50, ignore_eos=True)
    llm.engine.add_request("a", [1, 2, 3], params)
    llm.engine.add_request("b", [1, 2, 3], params)
    for _ in range(3):
        llm.engine.step()
    last = llm.engine.abort("a")
    assert [(delta.request_id, delta.index) for delta in last] == [("a", 0), ("a", 1), ("a", 2)]
    assert llm.engine.abort("a") == []
    deltas = drain(llm)
    assert {(delta.request_id, delta.index) for delta in deltas} == {("b", i) for i in range(3)}
    assert page_check(llm.engine) == 0


def test_an_abort_in_mid_prompt_shows_no_half_of_its_logprobs(tiny: PreTrainedModel) -> None:
    llm = make(tiny, max_batch_tokens=16)
    llm.engine.add_request("a", list(range(40)), SamplingParams(prompt_logprobs=0))
    llm.engine.step()
    (last,) = llm.engine.abort("a")
    assert last.prompt_logprobs is None


def test_seeds_of_answers_are_as_documented() -> None:
    assert [answer_seed(5, i) for i in range(3)] == [5, 12099282195316335764, 6922492831819982632]


def test_an_id_is_in_use_until_its_last_answer_ends(tiny: PreTrainedModel) -> None:
    llm = make(tiny)
    llm.engine.add_request("a", [1, 2, 3], SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    while llm.engine.has_work:
        with pytest.raises(InvalidRequestError, match="request_id: 'a' is already in use"):
            llm.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=5))
        llm.engine.step()
    llm.engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=5))
    drain(llm)


def test_an_answer_that_fails_leaves_its_siblings_alone(tiny: PreTrainedModel) -> None:
    class FailsInAnswerOne:
        """Counts its clones; the one for answer 1 fails at the third token."""

        def __init__(self, clones: list[int], number: int | None = None) -> None:
            self.clones, self.number = clones, number

        def clone(self) -> FailsInAnswerOne:
            self.clones.append(len(self.clones))
            return FailsInAnswerOne(self.clones, self.clones[-1])

        def __call__(self, token_ids: Any, scores: Any) -> Any:
            if self.number == 1 and token_ids.shape[1] > 5:
                raise RuntimeError("enough")
            return scores

    llm = make(tiny)
    params = SamplingParams(
        n=3, max_tokens=10, ignore_eos=True, logits_processors=[FailsInAnswerOne([])]
    )
    llm.engine.add_request("a", [1, 2, 3], params)
    deltas = drain(llm)
    failed = [delta for delta in deltas if delta.error is not None]
    assert [(delta.index, delta.error_field) for delta in failed] == [(1, "logits_processors")]
    assert "RuntimeError: enough" in (failed[0].error or "")
    ends = [delta.index for delta in deltas if delta.finish_reason and delta.error is None]
    assert sorted(ends) == [0, 2]
    assert page_check(llm.engine) == 0
