"""An engine under the test's control: it fails, stalls and emits when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.config import EngineConfig
from specdec.output import RequestDelta, RequestStats
from specdec.request import FinishReason, SamplingParams


@dataclass
class FakeRequest:
    request_id: str
    seed: int
    num_left: int
    stats: RequestStats = field(default_factory=RequestStats)


class FakeEngine:
    """Counts from 0 upwards, two tokens a step, one word a token.

    fail: called with each request before its step; what it returns becomes the delta's error, what
    it raises stops the engine. steps: a semaphore that must be acquired for each step, if given.
    """

    def __init__(
        self,
        fail: Callable[[FakeRequest], str | None] = lambda request: None,
        steps: threading.Semaphore | None = None,
    ) -> None:
        self.config = EngineConfig()
        self.tokenizer = None
        self.vocab_size = 100
        self.max_model_len = 1000
        self.requests: dict[str, FakeRequest] = {}
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
        request = FakeRequest(request_id, params.seed or 7, params.max_tokens or 10)
        request.stats.num_prompt_tokens = len(ids)
        self.requests[request_id] = request
        return request

    def abort(self, request_id: str) -> None:
        assert threading.current_thread() is self.thread
        if self.requests.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def reset_state(self) -> None:
        self._warm = True

    def step(self) -> list[RequestDelta]:
        assert threading.current_thread() is self.thread
        if self._steps is not None and self._warm:
            self._steps.acquire()
        return [self._advance(request) for request in list(self.requests.values())]

    def _advance(self, request: FakeRequest) -> RequestDelta:
        error = self._fail(request) if self._warm else None
        first = request.stats.num_output_tokens
        ids = tuple(range(first, first + min(2, request.num_left)))
        request.num_left -= len(ids)
        request.stats.num_output_tokens += len(ids)
        done = request.num_left == 0 or error is not None
        if done:
            del self.requests[request.request_id]
        return RequestDelta(
            request.request_id,
            ids,
            "".join(f" {i}" for i in ids),
            (),
            FinishReason.LENGTH if done else None,
            None,
            request.stats,
            error,
        )
