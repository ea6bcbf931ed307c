"""A call that ends early frees its pages within a step (faults H2, Q3)."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from specdec.request import SamplingParams, Speculation
from specdec.rpc.client import Client
from specdec.rpc.errors import ServerError
from specdec.testing import page_check
from tests.rpc.running import RunningServer

LONG = SamplingParams(temperature=0.0, max_tokens=2500, ignore_eos=True)
"""With OFF this takes much longer than any test waits."""
OFF = Speculation(mode="off")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def wait_until_idle(running: RunningServer, seconds: float = 1.0) -> None:
    """Within seconds: no request, no page in use, and the target is not run any more."""
    deadline = time.monotonic() + seconds
    while running.engine(lambda engine: engine.has_work):
        assert time.monotonic() < deadline, running.engine(lambda engine: engine.page_owners())
        time.sleep(0.01)
    assert running.engine(page_check) == 0
    passes = running.engine(lambda engine: engine.counters.num_passes)
    time.sleep(0.05)
    assert running.engine(lambda engine: engine.counters.num_passes) == passes


def test_cancel_frees_everything(running: RunningServer, client: Client) -> None:
    cold = client.complete(PROMPT, SamplingParams(temperature=0.0, max_tokens=30))
    for round_ in range(15):
        stream = client.generate(PROMPT, LONG, OFF, request_id=f"cancel-{round_}")
        for _ in range(3):
            next(stream)
        stream.cancel()
        assert list(stream) == []
    wait_until_idle(running)
    again = client.complete(PROMPT, SamplingParams(temperature=0.0, max_tokens=30))
    assert again.token_ids == cold.token_ids


def test_a_stream_that_is_dropped_is_cancelled(running: RunningServer, client: Client) -> None:
    stream = client.generate(PROMPT, LONG, OFF)
    next(stream)
    del stream
    wait_until_idle(running)


def test_a_client_that_vanishes_frees_everything(running: RunningServer) -> None:
    client = Client(running.address)
    streams = [client.generate(PROMPT, LONG, OFF) for _ in range(4)]
    for stream in streams:
        next(stream)
    client.close()
    wait_until_idle(running)


def test_deadline_ends_the_request(running: RunningServer, client: Client) -> None:
    def one(_: int) -> tuple[grpc.StatusCode, float]:
        start = time.monotonic()
        with pytest.raises(ServerError) as caught:
            client.complete(PROMPT, LONG, OFF, timeout=0.2)
        return caught.value.code, time.monotonic() - start

    with ThreadPoolExecutor(12) as pool:  # more than may run at once: some are still waiting
        results = list(pool.map(one, range(12)))
    assert {code for code, _ in results} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    assert max(seconds for _, seconds in results) < 1.0
    wait_until_idle(running)


def test_others_go_on(running: RunningServer, client: Client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60)
    expected = client.complete(PROMPT, params).token_ids
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.complete, PROMPT, params)
        for _ in range(5):
            with client.generate([7, 7, 7], LONG, OFF) as stream:
                next(stream)
        assert other.result(timeout=30).token_ids == expected
    wait_until_idle(running)


def test_cancelling_several_answers_frees_everything(
    running: RunningServer, client: Client
) -> None:
    params = dataclasses.replace(LONG, n=3, temperature=1.0)
    for _ in range(3):
        stream = client.generate(PROMPT, params, OFF)
        seen: set[int] = set()
        while seen != {0, 1, 2}:
            seen.add(next(stream).index)
        stream.cancel()
        assert list(stream) == []
    wait_until_idle(running)


def test_several_answers_cancelled_while_they_wait_are_never_run(
    running: RunningServer, client: Client
) -> None:
    params = dataclasses.replace(LONG, n=24)  # three times what may run at once
    with client.generate(PROMPT, params, OFF) as stream:
        next(stream)
    wait_until_idle(running)
