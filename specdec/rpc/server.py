"""The gRPC server: listen, load, serve, stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec.errors import SpecdecError
from specdec.rpc.bridge import EngineThread
from specdec.rpc.service import SERVICE_NAME, InferenceService

if TYPE_CHECKING:
    from specdec.engine import Engine

MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest request: a prompt of 100,000 token ids is about 0.4 MB."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # gRPC shares a port between processes by default: a second server would silently take half of
    # the calls instead of failing.
    ("grpc.so_reuseport", 0),
    # Gateways ping idle connections more often than gRPC's default of five minutes allows.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A peer that vanished without a word holds its request until this finds out.
    ("grpc.keepalive_time_ms", 60_000),
]
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_DRAIN_SECONDS = 1.0


class Server:
    """One engine behind one port; create and use it on a running event loop.

    create_engine: called on the engine's own thread.
    port: 0 lets the system choose; the attribute `port` is the one in use after `start`.
    reflection_enabled: offer gRPC server reflection.

    Health (grpc.health.v1, for "" and for the service's name) is NOT_SERVING until the engine is
    loaded and warm, and from the moment it stops.
    """

    def __init__(
        self,
        create_engine: Callable[[], Engine],
        *,
        host: str = "127.0.0.1",
        port: int = 50051,
        reflection_enabled: bool = True,
    ) -> None:
        self.host = host
        self.port = port
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.engine = EngineThread(create_engine, self._engine_failed)
        self._service = InferenceService(self.engine)
        self._health = health.aio.HealthServicer()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = grpc.aio.server(options=_OPTIONS)
        self._service.add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if reflection_enabled:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    @property
    def address(self) -> str:
        """host:port, as a client needs it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    async def start(self) -> None:
        """Listen; calls are answered UNAVAILABLE until `load` has returned.

        Raises SpecdecError if the address cannot be used.
        """
        await self._set_health(_NOT_SERVING)
        try:
            self.port = self._server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise SpecdecError(
                f"cannot listen on {self.address}: is another server using the port? "
                "Choose another --port (0 lets the system choose) or --host"
            ) from error
        await self._server.start()

    async def load(self) -> None:
        """Load and warm up the engine, then serve. Raises what create_engine raised."""
        await self.engine.start()
        await self._set_health(_SERVING)

    async def stop(self, grace: float) -> None:
        """Stop: no new calls, running ones get grace seconds, the engine goes last.

        A second call with a shorter grace shortens the first.
        """
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
        # stop() returns while handlers that it cancelled still clean up.
        await self._service.drained(_DRAIN_SECONDS)
        await self.engine.stop()

    def _engine_failed(self, error: Exception) -> None:
        task = asyncio.ensure_future(self._set_health(_NOT_SERVING))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not self.failure.done():
            self.failure.set_result(error)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)


async def run_server(
    server: Server,
    *,
    grace: float,
    on_listening: Callable[[Server], None],
    on_ready: Callable[[Server], None],
    on_stopping: Callable[[Server], None],
) -> None:
    """Run a server until SIGTERM or SIGINT; a second signal ends running calls at once.

    Must run on the main thread. Raises SpecdecError if the engine cannot be loaded or stops.
    """
    # An event of our own: cancelling server.wait_for_termination() would break server.stop().
    stopping = asyncio.Event()
    hurry = asyncio.Event()

    def interrupted() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted)
    stop_requested = asyncio.ensure_future(stopping.wait())
    await server.start()
    on_listening(server)
    loading = asyncio.ensure_future(server.load())
    try:
        await _first_of(loading, stop_requested)
        if loading.done():
            loading.result()
            on_ready(server)
            await _first_of(server.failure, stop_requested)
        on_stopping(server)
    finally:
        loading.cancel()
        stop_requested.cancel()
        await _stop(server, grace, hurry)
    if server.failure.done():
        raise SpecdecError(f"the engine has stopped: {server.failure.result()}")


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def _stop(server: Server, grace: float, hurry: asyncio.Event) -> None:
    stop = asyncio.ensure_future(server.stop(grace))
    hurried = asyncio.ensure_future(hurry.wait())
    await _first_of(stop, hurried)
    if not stop.done():
        await server.stop(0)
    hurried.cancel()
    await stop
