"""One answer on the command line: where it comes from, how it is shown, what is said about it."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from specdec.errors import SpecdecError
from specdec.output import RequestDelta, RequestStats, TokenLogprobs
from specdec.request import FinishReason, SamplingParams, Speculation

if TYPE_CHECKING:
    from specdec.engine import Engine

_DERIVED_STATS = (
    "acceptance_length",
    "mean_acceptance_length",
    "acceptance_rate",
    "path_acceptance_rate",
    "tokens_per_second",
    "time_to_first_token",
)
_CLOCK_STATS = ("arrival_time", "first_token_time", "last_token_time")


class AnswerStream(Protocol):
    """A running request: the gRPC client's GenerateStream, or LocalStream."""

    seed: int

    def __iter__(self) -> Iterator[RequestDelta]: ...

    def cancel(self) -> None: ...


class LocalStream(Iterator[RequestDelta]):
    """One request on an engine of this process, stepped by iterating. Raises SpecdecError."""

    def __init__(
        self,
        engine: Engine,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        speculation: Speculation | None,
    ) -> None:
        request = engine.add_request("generate", prompt_token_ids, params, speculation)
        self.seed = request.seed
        self._id = request.request_id
        self._engine = engine
        self._cancelled = False
        self._finished = False

    def __next__(self) -> RequestDelta:
        if self._finished:
            raise StopIteration
        delta = None
        while delta is None:
            if self._cancelled:
                delta = self._engine.abort(self._id)
                if delta is None:
                    raise StopIteration
            else:
                delta = next(iter(self._engine.step()), None)
        if delta.error is not None:
            raise SpecdecError(delta.error)
        self._finished = delta.finish_reason is not None
        return delta

    def cancel(self) -> None:
        """End the request after the running step; its last delta still comes."""
        self._cancelled = True


class Answer:
    """What has arrived of an answer.

    stats: the engine's, complete once the answer is; of one that was cut off, the counts that had
    arrived and times on this side's clock. finish_reason: ABORT until the stream said otherwise.
    """

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason = FinishReason.ABORT
        self.stop_reason: str | int | None = None
        self.stats = RequestStats(arrival_time=time.monotonic())
        self._arrival = time.monotonic()
        self._first = 0.0

    def add(self, delta: RequestDelta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.stats = delta.stats
            return
        now = time.monotonic()
        self._first = self._first or now
        self.stats = dataclasses.replace(
            delta.stats,
            arrival_time=self._arrival,
            first_token_time=self._first,
            last_token_time=now,
        )

    def summary(self) -> str:
        """One line of statistics."""
        stats = self.stats
        parts = [f"{stats.num_output_tokens} tokens"]
        if stats.num_output_tokens > 1:
            parts += [
                f"{stats.tokens_per_second:.1f} tokens/s",
                f"acceptance length {stats.acceptance_length:.2f}",
            ]
        if stats.num_draft_path_tokens:
            parts.append(f"{stats.path_acceptance_rate:.0%} of drafted depth accepted")
        if stats.num_output_tokens:
            parts.append(f"first token {stats.time_to_first_token * 1e3:.0f} ms")
        return " · ".join([*parts, self.finish_reason.value])

    def as_json(self, seed: int) -> str:
        """The answer as one JSON object."""
        stats = dataclasses.asdict(self.stats)
        for name in _CLOCK_STATS:
            del stats[name]
        stats |= {name: getattr(self.stats, name) for name in _DERIVED_STATS}
        record: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason.value,
            "stop_reason": self.stop_reason,
            "seed": seed,
            "stats": stats,
        }
        if self.logprobs:
            record["logprobs"] = [dataclasses.asdict(entry) for entry in self.logprobs]
        return json.dumps(record, ensure_ascii=False)


@contextmanager
def cancelled_by_interrupt(stream: AnswerStream) -> Iterator[list[int]]:
    """Let Ctrl-C cancel a stream instead of raising; a second one raises KeyboardInterrupt.

    Yields a list that is not empty once that happened.
    """
    interrupts: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, before)
        stream.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def read_answer(stream: AnswerStream, *, echo: bool) -> tuple[Answer, bool]:
    """Read a stream to its end or to Ctrl-C; echo: print its text as it comes.

    Returns the answer and whether it was interrupted.
    """
    answer = Answer()
    with cancelled_by_interrupt(stream) as interrupts:
        for delta in stream:
            answer.add(delta)
            if echo and delta.text:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    if echo and not answer.text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return answer, bool(interrupts)
