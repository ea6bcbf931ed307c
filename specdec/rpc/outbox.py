"""What waits between the engine and one client."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence

from specdec.errors import InvalidRequestError
from specdec.output import RequestDelta, TokenLogprobs
from specdec.rpc.errors import RequestFailedError

_MAX_LOGPROBS = 100_000
"""Log-probabilities in one message, about 1 MB: gRPC clients take 4 MB unless told otherwise."""


def merge_deltas(deltas: Sequence[RequestDelta]) -> list[RequestDelta]:
    """The deltas of each answer of a request as one: what was added joined, the rest the last's.

    In the order in which the answers first come up.
    """
    answers: dict[int, list[RequestDelta]] = {}
    for delta in deltas:
        answers.setdefault(delta.index, []).append(delta)
    return [_merged(parts) for parts in answers.values()]


def _merged(deltas: Sequence[RequestDelta]) -> RequestDelta:
    if len(deltas) == 1:
        return deltas[0]
    return dataclasses.replace(
        deltas[-1],
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


def split_delta(delta: RequestDelta) -> list[RequestDelta]:
    """The delta in parts that fit into a message each; joined in order they are the delta.

    The log-probabilities of the prompt come first, the text with the last part.
    """
    if delta.prompt_logprobs is None and not delta.logprobs:
        return [delta]
    prompt_parts = _parts(delta.prompt_logprobs or ())
    output_parts = _parts(delta.logprobs) if delta.logprobs else [(0, len(delta.token_ids))]
    parts = [
        dataclasses.replace(
            delta, token_ids=(), text="", logprobs=(), prompt_logprobs=_cut(delta, start, end)
        )
        for start, end in prompt_parts[:-1]
    ]
    prompt_logprobs = _cut(delta, *prompt_parts[-1])
    for start, end in output_parts:
        is_last = end == len(delta.token_ids)
        part = dataclasses.replace(
            delta,
            token_ids=delta.token_ids[start:end],
            text=delta.text if is_last else "",
            logprobs=delta.logprobs[start:end],
            prompt_logprobs=prompt_logprobs,
        )
        parts.append(part)
        prompt_logprobs = None
    return parts


def _cut(delta: RequestDelta, start: int, end: int) -> tuple[TokenLogprobs | None, ...] | None:
    return None if delta.prompt_logprobs is None else delta.prompt_logprobs[start:end]


def _parts(entries: Sequence[TokenLogprobs | None]) -> list[tuple[int, int]]:
    """Ranges of entries, at least one, each with at most _MAX_LOGPROBS log-probabilities."""
    ranges, start, held = [], 0, 0
    for i, entry in enumerate(entries):
        count = 1 if entry is None else 1 + len(entry.top)
        if i > start and held + count > _MAX_LOGPROBS:
            ranges.append((start, i))
            start, held = i, 0
        held += count
    return [*ranges, (start, len(entries))]


class RequestStream:
    """Outbox of one request, read by `async for`; used on the loop's thread only.

    Deltas of one answer that arrive while nobody reads are merged into one, so what a slow reader
    costs is bounded by the answers' length, and the engine never waits for it. Iteration ends after
    every one of the answers has had a delta with a finish_reason, and raises if the request was
    refused or one of its answers failed.

    num_answers: how many deltas with a finish_reason are to come.
    seeds: of each answer, known from the first delta on.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        on_close: Callable[[], None],
        *,
        num_answers: int = 1,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.seeds: tuple[int, ...] = ()
        self._num_running = num_answers
        self._deltas: list[RequestDelta] = []
        self._error: Exception | None = None
        self._done = False
        self._changed = asyncio.Event()
        self._on_close = on_close

    @property
    def is_done(self) -> bool:
        """Whether nothing more is to come: all answers ended, one failed, or it was closed."""
        return self._done

    def put(self, delta: RequestDelta) -> None:
        """Append a delta; one that carries an error fails the stream."""
        if self._done:
            return
        if delta.error is not None:
            self.fail(_failure(delta.error, delta.error_field))
            return
        self._deltas.append(delta)
        self._num_running -= delta.finish_reason is not None
        self._done = self._num_running == 0
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
                waiting, self._deltas = self._deltas, []
                for delta in merge_deltas(waiting):
                    yield delta
            elif self._error is not None:
                raise self._error
            else:
                return


def _failure(message: str, field: str | None) -> Exception:
    return RequestFailedError(message) if field is None else InvalidRequestError(field, message)
