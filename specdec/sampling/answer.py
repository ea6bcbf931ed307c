"""The growing answer of one request: tokens, text, log-probabilities, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.output import TokenLogprobs
from specdec.request import FinishReason, SamplingParams
from specdec.tokenizer import TextStream, Tokenizer


class StopScanner:
    """Finds stop strings in text that arrives in pieces, and holds back what may begin one.

    include_stop: the text keeps the stop string that ends it.
    """

    def __init__(self, stops: Iterable[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that is now final, and the stop string that was completed, which ends the text.

        may_stop: False lets stop strings pass that end in this piece.
        """
        text = self._held + piece
        hits = [(text.find(stop), order) for order, stop in enumerate(self._stops)]
        hits = [hit for hit in hits if hit[0] >= 0]
        if hits and may_stop:
            start, order = min(hits)
            self._held = ""
            stop = self._stops[order]
            return text[: start + len(stop) * self._include_stop], stop
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

    Stop (EOS, stop token, stop string) beats length. The ending token belongs to the ids; unless
    the parameters include it, an ending EOS or stop token adds no text, and text ends before a stop
    string. Everything is judged once, at the token where it happens, so ids, text and
    log-probabilities are cut at the same place.
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
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._stream: TextStream | None = None
        if tokenizer is not None:
            self._stream = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._include_stop = params.include_stop_str_in_output
        self._scanner = StopScanner(params.stop or (), include_stop=self._include_stop)
        self._new_text: list[str] = []
        self._new_logprobs: list[TokenLogprobs] = []
        self._num_delivered = 0

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the answer."""
        return self._stop_ids | self._eos_ids

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self._max_tokens - len(self.token_ids)

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Add one emitted token; returns the finish reason if it was the last."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self._new_logprobs.append(logprobs)
        if token_id in self.end_token_ids:
            if self._include_stop and self._stream is not None:
                self._new_text.append(self._scanner.flush() + self._stream.push(token_id))
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
        # min_tokens counts tokens before the one that ends the answer.
        may_stop = len(self.token_ids) > self._min_tokens
        text, stop = self._scanner.push(piece, may_stop=may_stop)
        self._new_text.append(text)
        if stop is not None:
            self.stop_reason = stop
        return stop is not None

    def _end(self, reason: FinishReason) -> FinishReason:
        self.finish_reason = reason
        return reason
