"""A source of answers that records what it was asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from specdec.cli.source import AnswerStream
from specdec.output import RequestDelta, RequestStats
from specdec.request import FinishReason, SamplingParams, Speculation


def delta(text: str, finish: FinishReason | None = None, *, index: int = 0) -> RequestDelta:
    """One token with this text."""
    stats = RequestStats(num_output_tokens=1)
    return RequestDelta("cli", (7,), text, (), finish, None, stats, index=index)


class FakeStream:
    """Deltas from a list; an exception in it is raised, a callable is called."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.seeds: dict[int, int] = {}
        self.cancelled = False
        self._items = items

    def __iter__(self) -> Iterator[RequestDelta]:
        for item in self._items:
            if self.cancelled:
                yield delta("", FinishReason.ABORT)
                return
            if isinstance(item, Exception):
                raise item
            if callable(item):
                item()
            else:
                yield item

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeSource:
    """Answers each request with the next of `answers`, or with "yes"."""

    answers: list[Sequence[Any]] = field(default_factory=list)
    asked: list[tuple[Any, SamplingParams, Speculation | None]] = field(default_factory=list)

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
    ) -> AnswerStream:
        assert params is not None
        self.asked.append((prompt, params, speculation))
        if self.answers:
            return FakeStream(self.answers.pop(0))
        return FakeStream([delta("yes", FinishReason.STOP, index=i) for i in range(params.n)])

    @contextmanager
    def opened(self, *arguments: Any) -> Iterator[FakeSource]:
        """In the place of specdec.cli.source.opened."""
        yield self
