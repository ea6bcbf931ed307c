"""A server in this process, on a loop of its own, for tests that use the synchronous client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from specdec.rpc.server import Server

T = TypeVar("T")


class RunningServer:
    """Context manager: a server on a free loopback port, loaded and warm unless told otherwise."""

    def __init__(self, create_engine: Callable[[], Any], *, load: bool = True) -> None:
        self._create_engine = create_engine
        self._load = load
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        self.server = self.run(self._start())
        if self._load:
            self.run(self.server.load())
        return self

    @property
    def address(self) -> str:
        return self.server.address

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=60)

    def engine(self, function: Callable[[Any], T]) -> T:
        """Run function(engine) on the engine's thread and wait for its result."""
        return self.run(self.server.engine.call(function))

    async def _start(self) -> Server:
        server = Server(self._create_engine, port=0)
        await server.start()
        return server

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run(self.server.stop(grace=0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
