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
from specdec.output import RequestDelta, RequestStats
from specdec.request import FinishReason, SamplingParams
from specdec.rpc.bridge import EngineThread
from specdec.rpc.client import Client
from specdec.rpc.errors import EngineUnavailableError, ServerError
from specdec.rpc.outbox import RequestStream
from tests.rpc.fake_engine import FakeEngine, FakeRequest
from tests.rpc.running import RunningServer

PARAMS = SamplingParams(max_tokens=10)


def delta(ids: tuple[int, ...], reason: FinishReason | None = None) -> RequestDelta:
    text = "".join(map(str, ids))
    return RequestDelta("r", ids, text, (), reason, None, RequestStats(num_output_tokens=len(ids)))


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
        assert stream.seed == 7

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
