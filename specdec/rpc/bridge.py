"""The engine on a thread of its own, beside the event loop that talks to clients.

The engine is created and touched on its thread only. The loop leaves actions in a list that the
thread takes between two steps; the thread answers with one callback a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from specdec.errors import InvalidRequestError, SpecdecError
from specdec.output import RequestDelta
from specdec.request import SamplingParams, Speculation
from specdec.rpc.errors import EngineUnavailableError
from specdec.rpc.outbox import RequestStream
from specdec.tokenizer import Prompt, Tokenizer, token_id_list

if TYPE_CHECKING:
    from specdec.engine import Engine

T = TypeVar("T")

_WARM_UP_TOKENS = 16


@dataclass
class _Report:
    """What became of one turn of the engine thread, for the loop.

    admitted: engine id and seed of each answer. refused: engine id and cause. results: of calls.
    """

    admitted: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    refused: list[tuple[str, Exception]] = field(default_factory=list)
    deltas: list[RequestDelta] = field(default_factory=list)
    results: list[tuple[asyncio.Future[Any], Any, Exception | None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.admitted or self.refused or self.deltas or self.results)


_Action = Callable[["Engine", _Report], None]


class EngineThread:
    """Runs an engine beside the event loop. Its methods are for the loop's thread.

    create_engine: called on the engine's thread; what it raises is raised by `start`.
    on_failure: called on the loop's thread if the engine stops by itself.

    speculation: the engine's default, known once `start` has returned.
    """

    def __init__(
        self,
        create_engine: Callable[[], Engine],
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        self.speculation = Speculation()
        self._create_engine = create_engine
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._refusal: tuple[str, str] | None = ("LOADING", "the model is still loading")
        self._tokenizer: Tokenizer | None = None
        # Encoding a long prompt takes longer than a step: neither the loop nor the engine waits.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="specdec-encode")
        self._streams: dict[str, RequestStream] = {}
        self._ids_in_flight: set[str] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._counter = itertools.count()
        self._wake = threading.Condition()
        self._actions: list[_Action] = []
        self._stopping = False
        # A daemon: loading cannot be interrupted, and must not hold up a process that wants to end.
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)

    @property
    def is_loading(self) -> bool:
        """Whether the thread is still busy creating the engine."""
        return self._thread.is_alive() and not self._ready.done()

    async def start(self) -> None:
        """Create the engine and warm it up. Raises what create_engine raised."""
        self._thread.start()
        await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """End the thread after its step; requests in flight fail with EngineUnavailableError."""
        self._refuse("STOPPING", "the server is stopping")
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._ready.done():
            await asyncio.to_thread(self._thread.join)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        speculation: Speculation | None,
    ) -> RequestStream:
        """Hand a request to the engine and return its outbox, to be closed by the caller.

        Raises EngineUnavailableError, and InvalidRequestError for a prompt that cannot be encoded
        or an id that is in flight; other faults of the request are raised by reading the outbox.
        """
        token_ids = await self._encode(prompt)
        self._check_available()
        if request_id in self._ids_in_flight:
            raise InvalidRequestError("request_id", f"{request_id!r} is in flight already")
        # The engine gets a name of its own: an id that a client uses twice must not receive what is
        # still on its way to the first use.
        engine_id = f"{request_id}#{next(self._counter)}"

        def close() -> None:
            self._forget(engine_id)
            self._abort(engine_id)

        def admit(engine: Engine, report: _Report) -> None:
            try:
                request = engine.add_request(engine_id, token_ids, params, speculation)
            except Exception as error:
                report.refused.append((engine_id, error))
            else:
                seeds = tuple(answer.seed for answer in (request, *request.siblings))
                report.admitted.append((engine_id, seeds))

        stream = RequestStream(request_id, token_ids, close, num_answers=params.n)
        self._streams[engine_id] = stream
        self._ids_in_flight.add(request_id)
        self._push(admit)
        return stream

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run function(engine) on the engine's thread between two steps and return its result."""
        self._check_available()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)

        def run(engine: Engine, report: _Report) -> None:
            try:
                report.results.append((future, function(engine), None))
            except Exception as error:
                report.results.append((future, None, error))

        self._push(run)
        return await future

    async def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        self._check_available()
        if self._tokenizer is not None:
            encode = self._tokenizer.prompt_token_ids
            return tuple(await self._loop.run_in_executor(self._encoder, encode, prompt))
        if isinstance(prompt, str):
            raise InvalidRequestError("prompt", "the model has no tokenizer: send token ids")
        return tuple(token_id_list(prompt))

    def _check_available(self) -> None:
        if self._refusal is not None:
            raise EngineUnavailableError(*self._refusal)

    def _push(self, action: _Action) -> None:
        with self._wake:
            self._actions.append(action)
            self._wake.notify()

    def _abort(self, engine_id: str) -> None:
        def abort(engine: Engine, report: _Report) -> None:
            engine.abort(engine_id)

        self._push(abort)

    def _forget(self, engine_id: str) -> None:
        stream = self._streams.pop(engine_id, None)
        if stream is not None:
            self._ids_in_flight.discard(stream.request_id)

    def _refuse(self, reason: str, message: str) -> None:
        """Take no more requests, and fail those in flight."""
        self._refusal = (reason, message)
        for engine_id, stream in list(self._streams.items()):
            stream.fail(EngineUnavailableError(reason, message))
            self._forget(engine_id)
        for future in list(self._calls):
            self._resolve(future, None, EngineUnavailableError(reason, message))

    # Callbacks from the engine's thread, run by the loop.

    def _became_ready(self, speculation: Speculation, tokenizer: Tokenizer | None) -> None:
        self.speculation = speculation
        self._tokenizer = tokenizer
        if not self._stopping:
            self._refusal = None
        self._ready.set_result(None)

    def _failed_to_start(self, error: BaseException) -> None:
        self._refuse("LOADING_FAILED", "the model could not be loaded")
        self._ready.set_exception(error)

    def _stopped(self, error: Exception) -> None:
        self._refuse("ENGINE_STOPPED", f"the engine has stopped: {error}")
        if self._on_failure is not None:
            self._on_failure(error)

    def _deliver(self, report: _Report) -> None:
        for engine_id, seeds in report.admitted:
            if engine_id in self._streams:
                self._streams[engine_id].seeds = seeds
        for engine_id, error in report.refused:
            if engine_id in self._streams:
                self._streams[engine_id].fail(error)
                self._forget(engine_id)
        for delta in report.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            stream.put(delta)
            if stream.is_done:
                self._forget(delta.request_id)
            if delta.error is not None:
                # The call fails: nobody waits for the other answers.
                self._abort(delta.request_id)
        for future, result, failure in report.results:
            self._resolve(future, result, failure)

    def _resolve(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        self._calls.discard(future)
        if future.done():  # its caller was cancelled
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    # The engine's thread.

    def _run(self) -> None:
        try:
            engine = self._create_engine()
            _warm_up(engine)
        except BaseException as error:
            self._post(self._failed_to_start, error)
            return
        self._post(self._became_ready, engine.config.speculation, engine.tokenizer)
        try:
            while (actions := self._next_actions(engine)) is not None:
                report = _Report()
                for action in actions:
                    action(engine, report)
                if engine.has_work:
                    report.deltas.extend(engine.step())
                if report:
                    self._post(self._deliver, report)
        except Exception as error:
            self._post(self._stopped, error)

    def _next_actions(self, engine: Engine) -> list[_Action] | None:
        """Wait until there is something to do; None means stop."""
        with self._wake:
            while not (self._stopping or self._actions or engine.has_work):
                self._wake.wait()
            actions, self._actions = self._actions, []
            return None if self._stopping else actions

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        # RuntimeError: the loop is closed, nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


def _warm_up(engine: Engine) -> None:
    """Run one short request, so that the first caller does not pay for what happens once."""
    length = max(1, min(_WARM_UP_TOKENS, engine.vocab_size, engine.max_model_len - 4))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add_request("warm-up", list(range(length)), params)
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                raise SpecdecError(f"the model fails on a short request: {delta.error}")
    engine.reset_state()
