"""Steps: who runs, who waits, who is preempted; failures, aborts, prefix reuse and counters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec import LLM, FinishReason, SamplingParams, Speculation
from specdec.cache import IntegrityError
from specdec.engine import Engine, EngineStoppedError
from specdec.errors import InvalidRequestError, SpecdecError
from specdec.output import RequestDelta
from specdec.testing import RandomDrafter, reference_generate, tiny_llama
from specdec_drafts import DraftRequest, Observation, TokenTree

MODEL = tiny_llama()
GREEDY = SamplingParams(temperature=0, max_tokens=12)
FIXED = Speculation(mode="fixed")


def engine(**config: Any) -> Engine:
    draft = config.pop("draft", "ngram")
    return LLM(MODEL, draft=draft, **config).engine


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(512) for _ in range(length)]


def drain(eng: Engine) -> dict[str, list[RequestDelta]]:
    deltas: dict[str, list[RequestDelta]] = {}
    while eng.has_work:
        for delta in eng.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        eng.check_integrity()
    return deltas


def ids(deltas: Sequence[RequestDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def expected(tokens: list[int], count: int = 12) -> list[int]:
    return list(reference_generate(MODEL, tokens, count))


def test_a_long_prompt_is_chunked_and_running_streams_move_every_step() -> None:
    eng = engine(max_batch_tokens=24, max_num_seqs=4)
    eng.add_request("short", prompt(5), SamplingParams(temperature=0, max_tokens=30))
    eng.step()
    long = prompt(150, 1)
    eng.add_request("long", long, GREEDY)
    steps, deltas = 0, eng.step()
    while deltas[-1].request_id != "long":
        assert [delta.request_id for delta in deltas] == ["short"]
        steps, deltas = steps + 1, eng.step()
    assert steps >= 150 // 24
    assert ids(deltas[-1:]) + ids(drain(eng)["long"]) == expected(long)


def test_every_running_stream_gets_a_row_even_when_trees_want_them_all() -> None:
    draft = RandomDrafter(512, (4, 3, 2), seed=1)
    eng = engine(draft=draft, max_batch_tokens=16, max_num_seqs=16, speculation=FIXED)
    for index in range(16):
        eng.add_request(str(index), prompt(1, index), GREEDY)
    eng.step()
    for _ in range(5):
        assert len(eng.step()) == 16
    drain(eng)


def test_preempted_requests_say_the_same() -> None:
    prompts = [prompt(20 + index, index) for index in range(6)]
    eng = engine(num_pages=18, page_size=4, max_model_len=64, speculation=FIXED)
    for index, tokens in enumerate(prompts):
        eng.add_request(str(index), tokens, SamplingParams(temperature=0, max_tokens=30))
    answers = drain(eng)
    assert eng.counters.num_preemptions > 0
    for index, tokens in enumerate(prompts):
        assert ids(answers[str(index)]) == expected(tokens, 30)
    assert eng.counters.num_used_pages == 0


def test_an_aborted_request_frees_its_pages_at_any_point() -> None:
    eng = engine(max_num_seqs=1)
    eng.add_request("running", prompt(30), GREEDY)
    eng.add_request("waiting", prompt(30, 1), GREEDY)
    eng.step()
    for request_id in ("running", "waiting"):
        (delta,) = eng.abort(request_id)
        assert delta.finish_reason is FinishReason.ABORT
        eng.check_integrity()
    assert eng.abort("running") == []
    assert not eng.has_work
    assert eng.counters.num_used_pages == 0
    assert eng.counters.num_aborted == 2


class BrokenDrafter:
    """Fails where it is told to, and remembers in which order it was called."""

    name = "broken"

    def __init__(self, where: str) -> None:
        self.where = where
        self.calls: list[str] = []

    def _fail_in(self, where: str) -> None:
        self.calls.append(where)
        if self.where == where:
            raise RuntimeError("no idea")

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self._fail_in("propose")
        token = -1 if self.where == "token" else 511
        return [TokenTree([r.token_ids[-1], token], [-1, 0], [1.0, 0.5], [0, 0]) for r in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._fail_in("observe")

    def release(self, request_id: str) -> None:
        self._fail_in("release")

    def reset(self) -> None: ...


@pytest.mark.parametrize("where", ["propose", "observe", "release", "token", "nowhere"])
def test_a_failing_drafter_is_passed_over(where: str, caplog: pytest.LogCaptureFixture) -> None:
    drafter = BrokenDrafter(where)
    eng = engine(draft=drafter, speculation=FIXED)
    eng.add_request("a", prompt(5), GREEDY)
    assert ids(drain(eng)["a"]) == expected(prompt(5))
    assert ("drafter broken failed" in caplog.text) == (where != "nowhere")
    assert drafter.calls[-2:] == ["observe", "release"]  # the last tree is observed, then forgotten


def test_a_failing_step_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    eng = engine(max_num_seqs=1)
    eng.add_request("running", prompt(5), GREEDY)
    eng.add_request("waiting", prompt(6), GREEDY)
    eng.step()

    def broken(batch: Any) -> torch.Tensor:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(eng._runner, "score", broken)
    (delta,) = eng.step()
    monkeypatch.undo()
    assert (delta.request_id, delta.error) == ("running", "RuntimeError: out of luck")
    assert delta.stats.num_output_tokens == 1
    eng.check_integrity()
    assert ids(drain(eng)["waiting"]) == expected(prompt(6))
    assert eng.counters.num_failed == 1


def test_trees_do_not_keep_a_newcomer_waiting() -> None:
    draft = RandomDrafter(512, (8, 6, 4), seed=1)
    wide = Speculation(mode="fixed", max_nodes=255)
    eng = engine(draft=draft, max_batch_tokens=64, max_num_seqs=4)
    for index in range(2):
        eng.add_request(str(index), prompt(4, index), SamplingParams(temperature=0), wide)
    eng.step()
    eng.step()
    eng.add_request("newcomer", prompt(60, 9), SamplingParams(temperature=0, max_tokens=2))
    answers: list[RequestDelta] = []
    for _ in range(4):  # half of the rows are the newcomer's: 60 tokens take two or three steps
        answers += [delta for delta in eng.step() if delta.request_id == "newcomer"]
    assert ids(answers) == expected(prompt(60, 9), 2)


@pytest.mark.parametrize("num_pages", [150, 170, 196, 201])
def test_speculation_preempts_nobody_that_plain_decoding_would_not(num_pages: int) -> None:
    def preemptions(speculation: Speculation) -> int:
        draft = RandomDrafter(512, (4, 3, 2), seed=1)
        eng = engine(draft=draft, page_size=1, num_pages=num_pages, prefix_cache=False)
        for index in range(4):
            params = SamplingParams(temperature=0, max_tokens=16)
            eng.add_request(str(index), prompt(20, index), params, speculation)
        drain(eng)
        return eng.counters.num_preemptions

    assert preemptions(FIXED) <= preemptions(Speculation(mode="off"))


def test_several_drafts_share_one_tree() -> None:
    eng = engine(draft=[RandomDrafter(512, 3, seed=1), "ngram"], speculation=FIXED)
    tokens = [*prompt(6), *prompt(6)]
    eng.add_request("both", tokens, GREEDY)
    eng.add_request("one", tokens, GREEDY, Speculation(mode="fixed", drafts=["ngram"]))
    answers = drain(eng)
    assert ids(answers["both"]) == ids(answers["one"]) == expected(tokens)
    drafted = {name: answer[-1].stats.num_draft_tokens for name, answer in answers.items()}
    assert drafted["both"] > drafted["one"]


def test_a_row_without_finite_logits_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eng = engine()
    score = eng._runner.score

    def poisoned(batch: Any) -> torch.Tensor:
        logits = score(batch).clone()
        logits[0] = float("nan")
        return logits

    eng.add_request("first", prompt(5), GREEDY)
    eng.add_request("second", prompt(6), GREEDY)
    monkeypatch.setattr(eng._runner, "score", poisoned)
    deltas = {delta.request_id: delta for delta in eng.step()}
    monkeypatch.undo()
    assert "not finite" in (deltas["first"].error or "")
    assert deltas["second"].error is None
    assert list(deltas["second"].token_ids) + ids(drain(eng)["second"]) == expected(prompt(6))


def test_an_engine_whose_pages_do_not_add_up_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    eng = engine()
    eng.add_request("a", prompt(5), GREEDY)

    def broken(batch: Any) -> torch.Tensor:
        eng._cache.pool._free.pop()
        raise RuntimeError("lost")

    monkeypatch.setattr(eng._runner, "score", broken)
    with pytest.raises(EngineStoppedError, match="lost"):
        eng.step()
    for call in (eng.step, lambda: eng.add_request("b", [1])):
        with pytest.raises(EngineStoppedError):
            call()


def test_prefixes_are_reused_and_reset_makes_the_engine_cold() -> None:
    eng = engine(page_size=4)
    tokens = prompt(33)
    for turn, cached in enumerate((0, 32, 32)):
        eng.add_request(str(turn), tokens, GREEDY)
        answer = drain(eng)[str(turn)]
        assert ids(answer) == expected(tokens)
        assert answer[-1].stats.num_cached_tokens == cached
    # A prompt that ends with a full page shares all of it and computes its last token again.
    eng.add_request("exact", tokens[:32], GREEDY)
    answer = drain(eng)["exact"]
    assert (answer[-1].stats.num_cached_tokens, ids(answer)) == (31, expected(tokens[:32]))
    eng.reset_state()
    assert eng.counters.num_cached_pages == 0
    eng.add_request("cold", tokens, GREEDY)
    assert drain(eng)["cold"][-1].stats.num_cached_tokens == 0


def test_output_pages_are_reused_by_the_next_turn() -> None:
    eng = engine(page_size=4, speculation=FIXED)
    tokens = prompt(9)
    eng.add_request("turn 1", tokens, GREEDY)
    longer = tokens + ids(drain(eng)["turn 1"]) + prompt(3, 7)
    eng.add_request("turn 2", longer, GREEDY)
    answer = drain(eng)["turn 2"]
    assert answer[-1].stats.num_cached_tokens == 20
    assert ids(answer) == expected(longer)


def test_prefix_cache_off_shares_nothing() -> None:
    eng = engine(prefix_cache=False)
    for turn in range(2):
        eng.add_request(str(turn), prompt(40), GREEDY)
        assert drain(eng)[str(turn)][-1].stats.num_cached_tokens == 0
    assert eng.counters.num_cached_pages == 0


def test_reset_needs_an_idle_engine() -> None:
    eng = engine()
    eng.add_request("a", prompt(3), GREEDY)
    with pytest.raises(SpecdecError, match="idle"):
        eng.reset_state()


def test_counters_are_the_sums_of_the_requests() -> None:
    eng = engine(draft=RandomDrafter(512, (2, 2), seed=0), speculation=FIXED, num_pages=24)
    for index in range(8):
        eng.add_request(str(index), prompt(10 + index, index % 3), GREEDY)
    answers = drain(eng)
    stats = [answer[-1].stats for answer in answers.values()]
    counters = eng.counters
    for name in (
        "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_decode_passes",
        "num_spec_steps", "num_draft_tokens", "num_draft_path_tokens",
        "num_accepted_draft_tokens", "num_preemptions",
    ):  # fmt: skip
        assert getattr(counters, name) == sum(getattr(one, name) for one in stats), name
    for one in stats:
        assert sum(one.acceptance_histogram) == one.num_spec_steps
        assert one.num_output_tokens == 12
        accepted = sum(count * times for count, times in enumerate(one.acceptance_histogram))
        assert accepted == one.num_accepted_draft_tokens


def test_counts_of_a_delta_do_not_change_afterwards() -> None:
    eng = engine()
    eng.add_request("a", prompt(5), GREEDY)
    first = eng.step()[0].stats
    drain(eng)
    assert (first.num_output_tokens, first.acceptance_histogram) == (1, [])


@pytest.mark.parametrize(
    ("change", "field"),
    [({"prompt_token_ids": []}, "prompt"), ({"prompt_token_ids": [512]}, "prompt"),
     ({"prompt_token_ids": [-1]}, "prompt"), ({"prompt_token_ids": [1] * 256}, "prompt"),
     ({"prompt_token_ids": ["a"]}, "prompt"), ({"request_id": "used"}, "request_id"),
     ({"params": SamplingParams(stop="x")}, "stop"),
     ({"params": SamplingParams(logprobs=513)}, "logprobs"),
     ({"speculation": Speculation(drafts=["eagle"])}, "speculation.drafts")],
)  # fmt: skip
def test_impossible_requests_are_refused_by_field(change: dict[str, Any], field: str) -> None:
    eng = engine()
    eng.add_request("used", [1])
    request = {"request_id": "new", "prompt_token_ids": [1], **change}
    with pytest.raises(InvalidRequestError) as caught:
        eng.add_request(**request)
    assert caught.value.field == field
    assert eng.counters.num_waiting == 1


def test_a_pool_smaller_than_the_context_limits_the_context() -> None:
    eng = engine(num_pages=3, page_size=16)
    assert eng.max_model_len == 48
    tokens = prompt(20)
    eng.add_request("a", tokens, SamplingParams(temperature=0), FIXED)
    answer = drain(eng)["a"]
    assert ids(answer) == expected(tokens, 28)
    assert answer[-1].finish_reason is FinishReason.LENGTH


def test_the_check_sees_a_request_without_a_root() -> None:
    eng = engine()
    request = eng.add_request("a", prompt(4), GREEDY)
    eng.step()
    request.token_ids.pop()
    with pytest.raises(IntegrityError, match="no token without KV"):
        eng.check_integrity()
