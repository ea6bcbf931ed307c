"""Log-probabilities of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.output import TokenLogprobs
from specdec.sampling.logprobs import token_logprobs


class PromptLogprobs:
    """Collects one entry a prompt token as its logits come by, in order and once each.

    num_top: most probable alternatives an entry lists. as_logits: logits as they are instead of
    their log-softmax. They are always the model's own: no parameter applies to a prompt.
    """

    def __init__(self, prompt: Sequence[int], num_top: int, *, as_logits: bool) -> None:
        self._prompt = prompt
        self._num_top = num_top
        self._as_logits = as_logits
        self._entries: list[TokenLogprobs | None] = [None]

    @property
    def is_complete(self) -> bool:
        """Whether every token of the prompt has its entry."""
        return len(self._entries) == len(self._prompt)

    def wanted(self, start: int, count: int) -> range:
        """Which of the rows at positions start .. start + count - 1 have logits still wanted.

        The row at position p judges the prompt token at p + 1. Rows are counted from 0.
        """
        first = len(self._entries) - 1
        return range(max(0, first - start), max(0, min(count, len(self._prompt) - 1 - start)))

    def add(self, row: NDArray[np.float32]) -> None:
        """The entry of the next prompt token, from float32 [V] logits of the row before it."""
        token_id = self._prompt[len(self._entries)]
        entry = token_logprobs(row, token_id, self._num_top, as_logits=self._as_logits)
        self._entries.append(entry)

    def take(self) -> tuple[TokenLogprobs | None, ...]:
        """All entries: None for the first token, which nothing comes before."""
        return tuple(self._entries)
