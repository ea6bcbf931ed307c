"""The engine's thread and the outbox, with an engine that does what the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from specdec.errors import InvalidRequestError, ModelError
from specdec.output import RequestDelta, RequestStats, TokenLogprobs
from specdec.request import FinishReason, SamplingParams
from specdec.rpc import convert
from specdec.rpc.bridge import EngineThread
from specdec.rpc.client import Client
from specdec.rpc.errors import EngineUnavailableError, ServerError
from specdec.rpc.outbox import RequestStream, split_delta
from tests.rpc.fake_engine import FakeEngine, FakeRequest
from tests.rpc.running import RunningServer

PARAMS = SamplingParams(max_tokens=10)


def delta(
    ids: tuple[int, ...], reason: FinishReason | None = None, index: int = 0, **fields: Any
) -> RequestDelta:
    text = "".join(map(str, ids))
    stats = RequestStats(num_output_tokens=len(ids))
    values: dict[str, Any] = {"logprobs": (), **fields}
    return RequestDelta(
        "r", ids, text, finish_reason=reason, stop_reason=None, stats=stats, index=index, **values
    )


def test_outbox_merges_what_nobody_has_read() -> None:
    async def scenario() -> None:
        stream = RequestStream("r", (1,), lambda: None)
        reader = aiter(stream)
        stream.put(delta((1,)))
        assert (await anext(reader)).token_ids == (1,)
        for ids in ((2, 3), (4,), (5, 6)):
            stream.put(delta(ids))
        merged = await anext(reader)
        assert (merged.token_ids, merged.text) == ((2, 3, 4, 5, 6), "23456")
        stream.put(delta((7,)))
        stream.put(delta((8,), FinishReason.LENGTH))
        last = await anext(reader)
        assert (last.token_ids, last.finish_reason) == ((7, 8), FinishReason.LENGTH)
        with pytest.raises(StopAsyncIteration):
            await anext(reader)

    asyncio.run(scenario())


def test_outbox_merges_each_answer_by_itself() -> None:
    async def scenario() -> None:
        stream = RequestStream("r", (1,), lambda: None, num_answers=3)
        reader = aiter(stream)
        stream.put(delta((1,), index=1))
        stream.put(delta((2,), index=0, prompt_logprobs=(None,)))
        stream.put(delta((3, 4), FinishReason.STOP, index=1))
        assert not stream.is_done
        stream.put(delta((5,), index=0))
        merged = [await anext(reader), await anext(reader)]
        assert [(d.index, d.token_ids, d.finish_reason) for d in merged] == [
            (1, (1, 3, 4), FinishReason.STOP),
            (0, (2, 5), None),
        ]
        assert [d.prompt_logprobs for d in merged] == [None, (None,)]
        stream.put(delta((6,), FinishReason.LENGTH, index=0))
        assert (await anext(reader)).token_ids == (6,)
        stream.put(delta((7,), FinishReason.LENGTH, index=2))
        assert stream.is_done
        assert (await anext(reader)).token_ids == (7,)
        with pytest.raises(StopAsyncIteration):
            await anext(reader)

    asyncio.run(scenario())


def entries(count: int, num_top: int) -> tuple[TokenLogprobs, ...]:
    top = dict.fromkeys(range(num_top), -2.0)
    return tuple(TokenLogprobs(i, -1.0, 1, top) for i in range(count))


@pytest.mark.parametrize(("num_top", "num_parts"), [(0, 1), (24_999, 4), (60_000, 13)])
def test_log_probabilities_travel_in_messages_of_bounded_size(num_top: int, num_parts: int) -> None:
    whole = delta(
        tuple(range(6)),
        logprobs=entries(6, num_top),
        prompt_logprobs=(None, *entries(8, num_top)),
    )
    parts = split_delta(whole)
    assert len(parts) == num_parts
    ids = tuple(token for part in parts for token in part.token_ids)
    logprobs = tuple(entry for part in parts for entry in part.logprobs)
    prompt = tuple(entry for part in parts for entry in part.prompt_logprobs or ())
    assert (ids, logprobs, prompt) == (whole.token_ids, whole.logprobs, whole.prompt_logprobs)
    assert [part.text for part in parts] == [""] * (num_parts - 1) + [whole.text]
    for part in parts:
        assert len(part.logprobs) == len(part.token_ids)
        assert convert.chunk_to_wire(part, 0, (5,)).ByteSize() < 2**21
    firsts = [part for part in parts if part.prompt_logprobs]
    assert not any(part.token_ids for part in firsts[:-1])


def test_outbox_gives_out_what_came_before_a_failure() -> None:
    async def scenario() -> None:
        stream = RequestStream("r", (1,), lambda: None)
        stream.put(delta((1,)))
        stream.fail(RuntimeError("broken"))
        reader = aiter(stream)
        assert (await anext(reader)).token_ids == (1,)
        with pytest.raises(RuntimeError, match="broken"):
            await anext(reader)

    asyncio.run(scenario())


def test_outbox_aborts_once_and_only_if_unfinished() -> None:
    async def scenario() -> None:
        aborts: list[int] = []
        stream = RequestStream("r", (1,), lambda: aborts.append(1))
        stream.close()
        stream.close()
        assert aborts == [1]
        finished = RequestStream("r", (1,), lambda: aborts.append(2))
        finished.put(delta((1,), FinishReason.STOP))
        finished.close()
        assert aborts == [1]

    asyncio.run(scenario())


def run_bridge(
    create_engine: Callable[[], Any],
    scenario: Callable[[EngineThread], Any],
    steps: threading.Semaphore | None = None,
) -> list[Exception]:
    """Run a scenario beside an engine; returns what on_failure was told.

    steps: what the engine waits for, so that it can be stopped whatever becomes of the scenario.
    """
    failures: list[Exception] = []

    async def run() -> None:
        bridge = EngineThread(create_engine, failures.append)
        await bridge.start()
        try:
            await scenario(bridge)
        finally:
            if steps is not None:
                steps.release(1000)
            await bridge.stop()

    asyncio.run(run())
    return failures


def test_engine_lives_on_its_own_thread() -> None:
    async def scenario(bridge: EngineThread) -> None:
        thread = await bridge.call(lambda engine: engine.thread)  # type: ignore[attr-defined]
        assert thread is not threading.current_thread()
        stream = await bridge.submit("a", [1, 2], PARAMS, None)
        ids = [token async for d in stream for token in d.token_ids]
        assert ids == list(range(10))
        assert stream.seeds == (7,)

    assert run_bridge(FakeEngine, scenario) == []


def test_slow_reader_gets_fewer_larger_deltas_and_holds_up_nobody() -> None:
    steps = threading.Semaphore(0)

    async def scenario(bridge: EngineThread) -> None:
        slow = await bridge.submit("slow", [1], PARAMS, None)
        quick = await bridge.submit("quick", [1], PARAMS, None)
        seen = []
        reader = aiter(quick)
        for _ in range(5):
            steps.release()
            seen.append((await anext(reader)).token_ids)
        assert seen == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
        deltas = [d async for d in slow]
        assert [d.token_ids for d in deltas] == [tuple(range(10))]
        assert deltas[0].text == "".join(f" {i}" for i in range(10))

    run_bridge(partial(FakeEngine, steps=steps), scenario, steps)


def test_closing_aborts_in_the_engine_and_frees_the_id() -> None:
    steps = threading.Semaphore(0)

    async def scenario(bridge: EngineThread) -> None:
        stream = await bridge.submit("a", [1], PARAMS, None)
        with pytest.raises(InvalidRequestError, match="in flight"):
            await bridge.submit("a", [1], PARAMS, None)
        stream.close()
        second = await bridge.submit("a", [1], SamplingParams(max_tokens=4), None)
        steps.release(100)
        ids = [token async for d in second for token in d.token_ids]
        assert ids == [0, 1, 2, 3], "nothing of the first request may reach the second"
        aborted = await bridge.call(lambda engine: engine.aborted)  # type: ignore[attr-defined]
        assert len(aborted) == 1

    run_bridge(partial(FakeEngine, steps=steps), scenario, steps)


def test_construction_failure_is_raised_by_start() -> None:
    def create() -> Any:
        raise ModelError("no such model")

    async def scenario() -> None:
        bridge = EngineThread(create)
        with pytest.raises(ModelError, match="no such model"):
            await bridge.start()
        with pytest.raises(EngineUnavailableError, match="could not be loaded"):
            await bridge.submit("a", [1], PARAMS, None)
        await bridge.stop()

    asyncio.run(scenario())


def test_engine_that_stops_fails_requests_and_calls() -> None:
    def fail(request: FakeRequest) -> str | None:
        raise RuntimeError("pages are gone")

    async def scenario(bridge: EngineThread) -> None:
        stream = await bridge.submit("a", [1], PARAMS, None)
        with pytest.raises(EngineUnavailableError, match="pages are gone") as caught:
            [d async for d in stream]
        assert caught.value.reason == "ENGINE_STOPPED"
        with pytest.raises(EngineUnavailableError):
            await bridge.submit("b", [1], PARAMS, None)
        with pytest.raises(EngineUnavailableError):
            await bridge.call(lambda engine: 1)

    failures = run_bridge(partial(FakeEngine, fail), scenario)
    assert [str(failure) for failure in failures] == ["pages are gone"]


def test_call_passes_results_and_errors() -> None:
    async def scenario(bridge: EngineThread) -> None:
        assert await bridge.call(lambda engine: engine.vocab_size) == 100
        with pytest.raises(ZeroDivisionError):
            await bridge.call(lambda engine: 1 / 0)

    run_bridge(FakeEngine, scenario)


def fail_second_answer(request: FakeRequest) -> InvalidRequestError | None:
    if request.index == 1 and request.stats.num_output_tokens == 4:
        return InvalidRequestError("grammar.regex", "leaves no token")
    return None


def test_all_answers_arrive_and_each_ends() -> None:
    with RunningServer(FakeEngine) as running, Client(running.address) as client:
        params = SamplingParams(max_tokens=10, n=3, seed=5)
        deltas = list(client.generate([1], params))
        for index in range(3):
            own = [d for d in deltas if d.index == index]
            assert [t for d in own for t in d.token_ids] == list(range(10 - 2 * index))
            assert [d.finish_reason for d in own if d.finish_reason] == [FinishReason.LENGTH]
            assert own[-1].finish_reason is not None
        answer = client.complete([1], params)
        assert [len(output.token_ids) for output in answer.outputs] == [10, 8, 6]
        assert [output.seed for output in answer.outputs] == [5, 6, 7]
        assert [output.index for output in answer.outputs] == [0, 1, 2]
        assert {output.prompt_token_ids for output in answer.outputs} == {(1,)}


def test_an_answer_at_fault_ends_the_others_and_names_the_field() -> None:
    create = partial(FakeEngine, fail_second_answer)
    with RunningServer(create) as running, Client(running.address) as client:
        # So many tokens that the others cannot end by themselves before they are aborted.
        stream = client.generate([1], SamplingParams(max_tokens=10**6, n=3))
        with pytest.raises(InvalidRequestError, match="leaves no token") as caught:
            list(stream)
        assert caught.value.field == "grammar.regex"
        assert len(running.engine(lambda engine: engine.aborted)) == 1
        assert not running.engine(lambda engine: engine.has_work)


def test_a_failed_step_is_internal_and_the_next_request_works() -> None:
    def fail(request: FakeRequest) -> str | None:
        return "out of luck" if request.request_id.startswith("bad") else None

    with RunningServer(partial(FakeEngine, fail)) as running, Client(running.address) as client:
        with pytest.raises(ServerError, match="out of luck") as caught:
            client.complete([1], PARAMS, request_id="bad")
        assert caught.value.code is grpc.StatusCode.INTERNAL
        assert client.complete([1], PARAMS).token_ids == tuple(range(10))


def test_prompts_without_a_tokenizer() -> None:
    with RunningServer(FakeEngine) as running, Client(running.address) as client:
        for prompt in ("text", [{"role": "user", "content": "hi"}]):
            with pytest.raises(InvalidRequestError) as caught:
                client.complete(prompt)
            assert caught.value.field == "prompt"
