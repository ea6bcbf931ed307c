"""An engine under the test's control: it fails, stalls and emits when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.config import EngineConfig
from specdec.errors import InvalidRequestError
from specdec.output import RequestDelta, RequestStats
from specdec.request import FinishReason, SamplingParams


@dataclass
class FakeRequest:
    """One of the n answers of a request."""

    request_id: str
    index: int
    seed: int
    num_left: int
    siblings: list[FakeRequest] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)


Fail = Callable[[FakeRequest], "str | InvalidRequestError | None"]


class FakeEngine:
    """Counts from 0 upwards, two tokens a step, one word a token; each further answer is two tokens
    shorter than the one before.

    fail: called with each answer before its step; what it returns becomes the delta's error, what
    it raises stops the engine. steps: a semaphore that must be acquired for each step, if given.
    """

    def __init__(
        self, fail: Fail = lambda request: None, steps: threading.Semaphore | None = None
    ) -> None:
        self.config = EngineConfig()
        self.tokenizer = None
        self.vocab_size = 100
        self.max_model_len = 1000
        self.requests: dict[str, list[FakeRequest]] = {}
        self.aborted: list[str] = []
        self.thread = threading.current_thread()
        self._fail = fail
        self._steps = steps
        self._warm = False

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_request(
        self, request_id: str, ids: Any, params: SamplingParams, speculation: Any = None
    ) -> FakeRequest:
        assert threading.current_thread() is self.thread
        seed, length = params.seed or 7, params.max_tokens or 10
        answers = [
            FakeRequest(request_id, index, seed + index, length - 2 * index)
            for index in range(params.n)
        ]
        for answer in answers:
            answer.stats.num_prompt_tokens = len(ids)
        answers[0].siblings = answers[1:]
        self.requests[request_id] = answers
        return answers[0]

    def abort(self, request_id: str) -> list[RequestDelta]:
        assert threading.current_thread() is self.thread
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)
        return []

    def reset_state(self) -> None:
        self._warm = True

    def step(self) -> list[RequestDelta]:
        assert threading.current_thread() is self.thread
        if self._steps is not None and self._warm:
            self._steps.acquire()
        answers = [answer for request in self.requests.values() for answer in request]
        return [self._advance(answer) for answer in answers]

    def _advance(self, answer: FakeRequest) -> RequestDelta:
        error = self._fail(answer) if self._warm else None
        first = answer.stats.num_output_tokens
        ids = tuple(range(first, first + min(2, answer.num_left)))
        answer.num_left -= len(ids)
        answer.stats.num_output_tokens += len(ids)
        done = answer.num_left == 0 or error is not None
        if done:
            running = [a for a in self.requests.pop(answer.request_id) if a is not answer]
            if running:
                self.requests[answer.request_id] = running
        return RequestDelta(
            answer.request_id,
            ids,
            "".join(f" {i}" for i in ids),
            (),
            FinishReason.LENGTH if done else None,
            None,
            answer.stats.snapshot(),
            error=error.message if isinstance(error, InvalidRequestError) else error,
            error_field=error.field if isinstance(error, InvalidRequestError) else None,
            index=answer.index,
        )
