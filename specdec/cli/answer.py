"""Answers on the command line: how they are read and shown, and what is said about them."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specdec.cli.source import AnswerStream
from specdec.output import RequestDelta, RequestStats, TokenLogprobs
from specdec.request import FinishReason

_DERIVED_STATS = (
    "acceptance_length",
    "mean_acceptance_length",
    "acceptance_rate",
    "path_acceptance_rate",
    "tokens_per_second",
    "time_to_first_token",
)
_CLOCK_STATS = ("arrival_time", "first_token_time", "last_token_time")


class Answer:
    """What has arrived of an answer.

    stats: the engine's, complete once the answer is; of one that was cut off, the counts that had
    arrived and times on this side's clock. finish_reason: ABORT until the stream said otherwise.
    """

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.is_complete = False
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
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.is_complete = True
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
        parts = [f"{stats.num_output_tokens} token{'s' * (stats.num_output_tokens != 1)}"]
        if stats.num_output_tokens > 1:
            parts += [
                f"{stats.tokens_per_second:.1f} tokens/s",
                f"acceptance length {stats.acceptance_length:.2f}",
            ]
        if stats.num_draft_path_tokens:
            parts.append(f"{stats.path_acceptance_rate:.0%} of drafted depth accepted")
        if stats.num_output_tokens:
            parts += [
                f"prompt {stats.num_prompt_tokens} tokens, {stats.num_cached_tokens} cached",
                f"first token {stats.time_to_first_token * 1e3:.0f} ms",
            ]
        return " · ".join([*parts, self.finish_reason.value])

    def as_json(self, index: int, seed: int | None) -> str:
        """The answer as one JSON object; index: among the n of its request; seed: if known."""
        stats = dataclasses.asdict(self.stats)
        for name in _CLOCK_STATS:
            del stats[name]
        stats |= {name: getattr(self.stats, name) for name in _DERIVED_STATS}
        record: dict[str, Any] = {
            "index": index,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason.value,
            "stop_reason": self.stop_reason,
            "seed": seed,
            "stats": stats,
        }
        if self.logprobs:
            record["logprobs"] = [dataclasses.asdict(entry) for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            record["prompt_logprobs"] = [
                None if entry is None else dataclasses.asdict(entry)
                for entry in self.prompt_logprobs
            ]
        return json.dumps(record, ensure_ascii=False)


class _Page:
    """Writes answers to stdout one below the other, each under its number if there are several.

    The first that is not complete is shown as it comes; what arrives for later ones waits.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers
        self._current = 0
        self._written = 0
        self._begun = False

    def update(self) -> None:
        """Write what has arrived since the last call."""
        while self._current < len(self._answers):
            answer = self._answers[self._current]
            self._write(answer)
            if not answer.is_complete:
                break
            self._end(answer)
        sys.stdout.flush()

    def close(self) -> None:
        """Write what there is of the answers that never became complete."""
        for answer in self._answers[self._current :]:
            self._write(answer)
            self._end(answer)
        sys.stdout.flush()

    def _write(self, answer: Answer) -> None:
        text = answer.text[self._written :]
        if not self._begun and (text or answer.is_complete):
            self._begun = True
            if len(self._answers) > 1:
                gap = "\n" if self._current else ""
                number = self._current + 1
                sys.stdout.write(f"{gap}--- answer {number} of {len(self._answers)} ---\n")
        sys.stdout.write(text)
        self._written += len(text)

    def _end(self, answer: Answer) -> None:
        if self._begun and not answer.text.endswith("\n"):
            sys.stdout.write("\n")
        self._current, self._written, self._begun = self._current + 1, 0, False


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


def read_answers(stream: AnswerStream, count: int, *, echo: bool) -> tuple[list[Answer], bool]:
    """Read a stream of count answers to its end or to Ctrl-C; echo: print text as it comes.

    Returns the answers and whether they were interrupted. What had come is on stdout even if the
    stream raises.
    """
    answers = [Answer() for _ in range(count)]
    page = _Page(answers)
    try:
        with cancelled_by_interrupt(stream) as interrupts:
            for delta in stream:
                answers[delta.index].add(delta)
                if echo:
                    page.update()
    finally:
        if echo:
            page.close()
    return answers, bool(interrupts)


def read_answer(stream: AnswerStream, *, echo: bool) -> tuple[Answer, bool]:
    """`read_answers` for a request with one answer."""
    answers, interrupted = read_answers(stream, 1, echo=echo)
    return answers[0], interrupted
