"""Answers over the wire are the answers of the Python API."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest

from specdec.grammar import Grammar
from specdec.output import RequestDelta, RequestStats
from specdec.request import FinishReason, SamplingParams, Speculation
from specdec.rpc import convert
from specdec.rpc.client import Client
from specdec.v1 import inference_pb2_grpc as pb_grpc
from tests.rpc.running import RunningServer

PROMPT = "the time of the day and the time of the year and the time of"
CHAT = [{"role": "user", "content": "how are you this year"}]
CLOCKS = {"arrival_time", "first_token_time", "last_token_time", "num_cached_tokens"}

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40),
    "sampled": SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, seed=2**63 + 5, max_tokens=40
    ),
    "penalties": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        max_tokens=40,
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3, max_tokens=24),
    "masks": SamplingParams(
        temperature=1.0,
        logit_bias={9: 3.5, 10: -100.0},
        allowed_token_ids=range(8, 200),
        bad_words=["th", [12, 13], [11]],
        min_tokens=30,
        stop=["e"],
        include_stop_str_in_output=True,
        max_tokens=40,
    ),
    "special tokens": SamplingParams(
        temperature=1.0,
        allowed_token_ids=[0, 2, 3, 60, 61],
        skip_special_tokens=False,
        cache_salt="mine",
        max_tokens=20,
    ),
    "grammar": SamplingParams(
        temperature=1.5, grammar=Grammar(choice=["yes", "no", "perhaps"]), max_tokens=20
    ),
    "chosen logprobs": SamplingParams(temperature=0.0, logprobs=0, max_tokens=5),
}


@pytest.mark.parametrize("prompt", [PROMPT, CHAT, [5, 6, 7, 8]], ids=["text", "chat", "ids"])
@pytest.mark.parametrize("name", PARAMS)
def test_answer_equals_the_python_api(client: Client, llm: Any, name: str, prompt: Any) -> None:
    params = PARAMS[name] if name == "greedy" else dataclasses.replace(PARAMS[name], seed=7)
    expected = llm.generate(prompt, params)[0]
    answer = client.complete(prompt, params)
    for field in ("prompt_token_ids", "token_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(answer, field) == getattr(expected, field), field
    if name != "greedy":
        assert answer.seed == expected.seed
    assert (answer.logprobs is None) == (params.logprobs is None)
    assert_same_logprobs(answer.logprobs, expected.logprobs)


SEVERAL = {
    "sampled": SamplingParams(temperature=1.0, n=3, seed=11, max_tokens=24, logprobs=2),
    "grammar": SamplingParams(
        temperature=1.5, n=3, seed=2**64 - 1, max_tokens=24, grammar=Grammar(regex="[ab]{3,9}")
    ),
    "many": SamplingParams(temperature=1.0, n=20, seed=0, max_tokens=8),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_answers_equal_the_python_api(client: Client, llm: Any, name: str) -> None:
    params = SEVERAL[name]
    expected = llm.generate(PROMPT, params)[0]
    answer = client.complete(PROMPT, params)
    assert len(answer.outputs) == len(expected.outputs) == params.n
    assert len({output.token_ids for output in answer.outputs}) > 1
    for mine, theirs in zip(answer.outputs, expected.outputs, strict=True):
        for field in ("index", "seed", "prompt_token_ids", "token_ids", "text", "finish_reason"):
            assert getattr(mine, field) == getattr(theirs, field), field
        assert_same_logprobs(mine.logprobs, theirs.logprobs)


def test_answer_0_is_what_one_answer_gives(client: Client) -> None:
    params = SEVERAL["sampled"]
    alone = client.complete(PROMPT, dataclasses.replace(params, n=1))
    assert alone.outputs == (alone,)
    assert client.complete(PROMPT, params).token_ids == alone.token_ids


@pytest.mark.parametrize("limit", [100_000, 20])
@pytest.mark.parametrize("prompt_logprobs", [0, 4])
def test_prompt_logprobs_equal_the_python_api(
    client: Client, llm: Any, monkeypatch: pytest.MonkeyPatch, prompt_logprobs: int, limit: int
) -> None:
    """limit: of log-probabilities in one message; the small one makes them come in parts."""
    monkeypatch.setattr("specdec.rpc.outbox._MAX_LOGPROBS", limit)
    params = SamplingParams(
        temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=prompt_logprobs, n=2
    )
    expected = llm.generate(PROMPT, params)[0]
    answer = client.complete(PROMPT, params)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    assert_same_logprobs(answer.prompt_logprobs, expected.prompt_logprobs)
    for mine, theirs in zip(answer.outputs, expected.outputs, strict=True):
        assert_same_logprobs(mine.logprobs, theirs.logprobs)
    deltas = list(client.generate(PROMPT, params))
    carriers = [delta for delta in deltas if delta.prompt_logprobs is not None]
    assert carriers == [next(delta for delta in deltas if delta.index == 0)]
    assert_same_logprobs(carriers[0].prompt_logprobs, expected.prompt_logprobs)
    assert answer.siblings[0].prompt_logprobs is None
    whole = "".join(delta.text for delta in deltas if delta.index == 0)
    assert whole == answer.text


def test_prompt_logprobs_on_the_wire_name_every_token(running: RunningServer) -> None:
    prompt = [5, 6, 7]
    request = convert.request_to_wire(prompt, SamplingParams(max_tokens=2, prompt_logprobs=1))
    with grpc.insecure_channel(running.address) as channel:
        stub: Any = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        chunk = next(stub.Generate(request)).chunk
    message = chunk.input_logprobs
    assert list(message.token_ids) == prompt
    assert [entry.HasField("value") for entry in message.token_logprobs] == [False, True, True]
    assert [len(top.values) for top in message.top_logprobs] == [0, 1, 1]
    assert message.ranks[0] == 0
    assert min(message.ranks[1:]) >= 1


def assert_same_logprobs(mine: Any, theirs: Any) -> None:
    assert (mine is None) == (theirs is None)
    for a, b in zip(mine or (), theirs or (), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.token_id, a.rank, list(a.top)) == (b.token_id, b.rank, list(b.top))
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert list(a.top.values()) == pytest.approx(list(b.top.values()), abs=1e-5)


def test_deltas_join_to_the_unary_answer(client: Client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=1)
    whole = client.complete(PROMPT, params)
    *chunks, last = client.generate(PROMPT, params)
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == whole.token_ids
    for chunk in chunks:
        assert len(chunk.logprobs) == len(chunk.token_ids)
        assert chunk.finish_reason is None
    emitted = 0
    for chunk in chunks:
        emitted += len(chunk.token_ids)
        assert chunk.stats.num_output_tokens == emitted
        assert chunk.stats.num_prompt_tokens == len(whole.prompt_token_ids)
    assert (last.token_ids, last.text) == ((), "")
    assert last.finish_reason is FinishReason.LENGTH
    assert last.stats.num_output_tokens == emitted == 60


def test_statistics_cross_the_wire(client: Client) -> None:
    repeated = [9, 10, 11, 12] * 20
    params = SamplingParams(temperature=0.0, max_tokens=50)
    stats = client.complete(repeated, params, Speculation(mode="fixed", max_nodes=8)).stats
    assert stats.num_output_tokens == 50
    assert stats.num_decode_passes > 0
    assert stats.num_spec_steps == sum(stats.acceptance_histogram)
    assert stats.num_draft_tokens >= stats.num_draft_path_tokens > 0
    assert stats.first_token_time > 0
    assert stats.last_token_time > stats.first_token_time
    assert stats.tokens_per_second > 0


def test_every_count_of_the_statistics_is_sent() -> None:
    names = {field.name for field in dataclasses.fields(RequestStats)} - CLOCKS
    values: dict[str, Any] = {name: 3 + i for i, name in enumerate(sorted(names))}
    values["acceptance_histogram"] = [4, 0, 2]
    stats = RequestStats(**values, num_cached_tokens=2, arrival_time=10.0, first_token_time=10.5)
    stats.last_token_time = 12.0
    delta = RequestDelta("a", (), "", (), FinishReason.STOP, "end", stats)
    back = convert.delta_of_complete("a", convert.complete_to_wire(delta, seed=1))
    for name in sorted(names | {"num_cached_tokens"}):
        assert getattr(back.stats, name) == getattr(stats, name), name
    assert back.stats.time_to_first_token == pytest.approx(0.5)
    assert back.stats.last_token_time - back.stats.first_token_time == pytest.approx(1.5)
    assert (back.finish_reason, back.stop_reason) == (FinishReason.STOP, "end")


def test_speculation_is_chosen_per_request(client: Client) -> None:
    repeated = [9, 10, 11, 12] * 20
    params = SamplingParams(temperature=0.0, max_tokens=40)
    off = client.complete(repeated, params, Speculation(mode="off"))
    on = client.complete(repeated, params, Speculation(mode="fixed"))
    assert off.stats.num_spec_steps == 0
    assert on.stats.num_spec_steps > 0
    assert off.token_ids == on.token_ids


def test_a_seed_that_was_drawn_replays(client: Client) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    first, second = client.complete(PROMPT, params), client.complete(PROMPT, params)
    assert first.seed != second.seed
    replay = client.complete(PROMPT, dataclasses.replace(params, seed=first.seed))
    assert replay.token_ids == first.token_ids
    assert replay.seed == first.seed


def test_finish_reasons_say_what_matched(client: Client) -> None:
    plain = client.complete(PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
    first_new = next(i for i, t in enumerate(plain.token_ids) if t not in plain.token_ids[:i] and i)
    token = plain.token_ids[first_new]
    by_token = client.complete(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[token])
    )
    assert (by_token.finish_reason, by_token.stop_reason) == (FinishReason.STOP, token)
    assert by_token.token_ids == plain.token_ids[: first_new + 1]
    text = plain.text[4:7]
    by_text = client.complete(PROMPT, SamplingParams(temperature=0.0, max_tokens=20, stop=[text]))
    assert (by_text.finish_reason, by_text.stop_reason) == (FinishReason.STOP, text)
    assert by_text.text == plain.text[: plain.text.index(text)]
    assert (plain.finish_reason, plain.stop_reason) == (FinishReason.LENGTH, None)
