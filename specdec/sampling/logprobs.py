"""Log-probabilities of one row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.output import TokenLogprobs

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
"""What a log-probability is computed from, named as in vLLM: the model's own logits, or the
logits after penalties, temperature and filters; as log-softmax or as they are."""


def token_logprobs(
    row: NDArray[np.float32], token_id: int, num_top: int, *, as_logits: bool
) -> TokenLogprobs:
    """The entry of token_id and of the num_top most probable tokens (ties by lowest id).

    row: float32 [V] logits. as_logits: report them as they are, else their log-softmax, computed
    in float64 and thus independent of summation order to float32 accuracy.
    """
    shift = 0.0
    if not as_logits:
        best = float(row.max())
        shift = best + float(np.log(np.exp(row.astype(np.float64) - best).sum()))
    top: dict[int, float] = {}
    count = min(num_top, len(row))
    if count > 0:
        kth = np.partition(row, len(row) - count)[len(row) - count]
        candidates = np.flatnonzero(row >= kth)
        order = np.lexsort((candidates, -row[candidates]))[:count]
        top = {int(token): float(row[token]) - shift for token in candidates[order]}
    rank = 1 + int(np.count_nonzero(row > row[token_id]))
    return TokenLogprobs(token_id, float(row[token_id]) - shift, rank, top)
