"""What waits between the engine and one client."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence

from specdec.output import RequestDelta
from specdec.rpc.errors import RequestFailedError


def merge_deltas(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """Consecutive deltas of one request as one: tokens and text joined, the rest is the last's."""
    if len(deltas) == 1:
        return deltas[0]
    return dataclasses.replace(
        deltas[-1],
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )


class RequestStream:
    """Outbox of one request, read by `async for`; used on the loop's thread only.

    Deltas that arrive while nobody reads are merged into one, so what a slow reader costs is
    bounded by the answer's length, and the engine never waits for it. Iteration ends after the
    delta that has a finish_reason, and raises if the request was refused or failed.

    seed: the seed in force, known from the first delta on.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: tuple[int, ...], on_close: Callable[[], None]
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.seed = 0
        self._deltas: list[RequestDelta] = []
        self._error: Exception | None = None
        self._done = False
        self._changed = asyncio.Event()
        self._on_close = on_close

    def put(self, delta: RequestDelta) -> None:
        """Append a delta; one that carries an error fails the stream."""
        if self._done:
            return
        if delta.error is not None:
            self.fail(RequestFailedError(delta.error))
            return
        self._deltas.append(delta)
        self._done = delta.finish_reason is not None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, raised after the deltas that came before it."""
        if not self._done:
            self._error = error
            self._done = True
            self._changed.set()

    def close(self) -> None:
        """Stop reading; a request that still runs is aborted. Idempotent."""
        if not self._done:
            self._done = True
            self._on_close()

    async def __aiter__(self) -> AsyncIterator[RequestDelta]:
        while True:
            while not self._deltas and not self._done:
                self._changed.clear()
                await self._changed.wait()
            if self._deltas:
                delta = merge_deltas(self._deltas)
                self._deltas.clear()
                yield delta
            elif self._error is not None:
                raise self._error
            else:
                return
