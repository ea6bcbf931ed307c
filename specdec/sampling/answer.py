"""The growing answer of one request: tokens, text, log-probabilities, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.output import TokenLogprobs
from specdec.request import FinishReason, SamplingParams
from specdec.tokenizer import TextStream, Tokenizer


class StopScanner:
    """Finds stop strings in text that arrives in pieces, and holds back what may begin one."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Text that is now final, and the stop string that was completed (text before it only)."""
        text = self._held + piece
        hits = [(text.find(stop), order) for order, stop in enumerate(self._stops)]
        hits = [hit for hit in hits if hit[0] >= 0]
        if hits:
            start, order = min(hits)
            self._held = ""
            return text[:start], self._stops[order]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, once nothing can complete it any more."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


class Answer:
    """Takes emitted tokens one by one, in order, and says when the request ends.

    Stop (EOS, stop token, stop string) beats length. The ending token belongs to the ids; an ending
    EOS or stop token adds no text, and text ends before a stop string. Everything is judged once,
    at the token where it happens, so ids, text and log-probabilities are cut at the same place.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        max_tokens: int,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._eos_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._max_tokens = max_tokens
        self._stream: TextStream | None = tokenizer.stream() if tokenizer else None
        self._scanner = StopScanner(params.stop or ())
        self._new_text: list[str] = []
        self._new_logprobs: list[TokenLogprobs] = []
        self._num_delivered = 0

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self._max_tokens - len(self.token_ids)

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Add one emitted token; returns the finish reason if it was the last."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self._new_logprobs.append(logprobs)
        if token_id in self._stop_ids or token_id in self._eos_ids:
            self.stop_reason = token_id if token_id in self._stop_ids else None
            return self.finish(FinishReason.STOP)
        if self._stream is not None and self._scan(self._stream.push(token_id)):
            return self._end(FinishReason.STOP)
        if self.room <= 0:
            return self.finish(FinishReason.LENGTH)
        return None

    def finish(self, reason: FinishReason) -> FinishReason:
        """End the answer here and flush its text, in which a stop string still makes it a stop."""
        if self._stream is not None:
            if self._scan(self._stream.finish()):
                return self._end(FinishReason.STOP)
            self._new_text.append(self._scanner.flush())
        return self._end(reason)

    def take(self) -> tuple[tuple[int, ...], str, tuple[TokenLogprobs, ...]]:
        """Token ids, final text and log-probabilities that came since the last call."""
        ids = tuple(self.token_ids[self._num_delivered :])
        self._num_delivered = len(self.token_ids)
        text, self._new_text = "".join(self._new_text), []
        logprobs, self._new_logprobs = tuple(self._new_logprobs), []
        return ids, text, logprobs

    def _scan(self, piece: str) -> bool:
        text, stop = self._scanner.push(piece)
        self._new_text.append(text)
        if stop is not None:
            self.stop_reason = stop
        return stop is not None

    def _end(self, reason: FinishReason) -> FinishReason:
        self.finish_reason = reason
        return reason
