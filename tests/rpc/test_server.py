"""Health, reflection, and the order of starting and stopping."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from specdec.errors import SpecdecError
from specdec.request import FinishReason, SamplingParams
from specdec.rpc.client import Client
from specdec.rpc.errors import ServerError
from specdec.rpc.server import Server
from specdec.v1 import inference_pb2 as pb
from specdec.v1 import inference_pb2_grpc as pb_grpc
from tests.rpc.fake_engine import FakeEngine, FakeRequest
from tests.rpc.running import RunningServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "specdec.v1.InferenceService"


def health(address: str) -> set[int]:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return {
            stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status
            for name in ("", SERVICE)
        }


def test_not_serving_until_loaded() -> None:
    loading = threading.Event()

    def create() -> Any:
        assert loading.wait(10)
        return FakeEngine()

    with RunningServer(create, load=False) as running, ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(lambda: running.run(running.server.load()))
        assert health(running.address) == {NOT_SERVING}
        with grpc.insecure_channel(running.address) as channel:
            stub: Any = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Generate(pb.GenerateRequest(text="a"))
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        info = error_details_pb2.ErrorInfo()
        status = rpc_status.from_call(caught.value)
        assert status is not None
        assert status.details[0].Unpack(info)
        assert (info.reason, info.domain) == ("LOADING", "specdec")
        loading.set()
        loaded.result(timeout=10)
        assert health(running.address) == {SERVING}


def test_not_serving_after_the_engine_stopped() -> None:
    def fail(request: FakeRequest) -> str | None:
        raise RuntimeError("pages are gone")

    with RunningServer(partial(FakeEngine, fail)) as running, Client(running.address) as client:
        assert health(running.address) == {SERVING}
        with pytest.raises(ServerError, match="pages are gone"):
            client.complete([1])
        assert health(running.address) == {NOT_SERVING}
        assert str(running.server.failure.result()) == "pages are gone"


def test_reflection_lists_the_services(running: RunningServer) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(running.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        response = next(stub.ServerReflectionInfo(iter([request])))
    names = {service.name for service in response.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


@contextmanager
def serving_fake(steps: threading.Semaphore) -> Iterator[tuple[RunningServer, Client]]:
    """A server whose engine waits for `steps` before each step, and its client."""
    with RunningServer(partial(FakeEngine, steps=steps)) as running:
        with Client(running.address) as client:
            yield running, client
        steps.release(1000)


def says_serving(address: str) -> bool:
    """Whether the server is there and has not begun to stop."""
    try:
        return health(address) == {SERVING}
    except grpc.RpcError:
        return False


def test_stop_lets_running_calls_finish_and_refuses_new_ones() -> None:
    steps = threading.Semaphore(0)
    with serving_fake(steps) as (running, client), ThreadPoolExecutor(1) as pool:
        stream = client.generate([1], SamplingParams(max_tokens=20))
        steps.release()
        first = next(stream)
        stopped = pool.submit(lambda: running.run(running.server.stop(grace=20)))
        while says_serving(running.address):
            time.sleep(0.01)
        steps.release(100)
        rest = list(stream)
        stopped.result(timeout=20)
        tokens = [*first.token_ids, *(t for d in rest for t in d.token_ids)]
        assert tokens == list(range(20))
        assert rest[-1].finish_reason is FinishReason.LENGTH
        with pytest.raises(ServerError):
            client.complete([1])


def test_stop_without_grace_never_ends_a_stream_with_ok() -> None:
    steps = threading.Semaphore(0)
    with serving_fake(steps) as (running, client):
        streams = [client.generate([1], SamplingParams(max_tokens=20)) for _ in range(4)]
        steps.release()
        threading.Timer(0.2, lambda: steps.release(100)).start()
        running.run(running.server.stop(grace=0))
        for stream in streams:
            with pytest.raises(ServerError) as caught:
                list(stream)
            assert caught.value.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_a_port_in_use_is_an_error_that_names_it(running: RunningServer) -> None:
    async def scenario() -> None:
        server = Server(FakeEngine, port=running.server.port)  # type: ignore[arg-type]
        with pytest.raises(SpecdecError, match=f":{running.server.port}.*--port"):
            await server.start()
        await server.stop(0)

    asyncio.run(scenario())
