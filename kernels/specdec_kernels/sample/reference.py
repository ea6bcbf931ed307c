"""The meaning of the law's tail, in numpy: one row of processed logits to one token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec_kernels.sample.philox import philox_words

Floats = NDArray[np.float32]

_MAX_NOISE = np.float32(23.0)
"""Above gumbel_noise of every word: that of word 0 is 33 log 2 = 22.87."""


def gumbel_noise(words: NDArray[np.uint32]) -> Floats:
    """Gumbel(0, 1) noise of uniform 32-bit words: -log(-log1p(-u)) with u = (word + 1/2) / 2**32.

    This form is accurate where noise is large (small words win) and gives -inf, a loss, for the
    words that round to u = 1; the common -log(-log(u)) gives +inf there, a token picked whatever
    its logit. Computed in float32; words [n] to float32 [n].
    """
    uniform = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):
        noise: Floats = -np.log(-np.log1p(-uniform))
    return noise


def _top_p_mask(scaled: Floats, kept: NDArray[np.intp], top_p: float) -> NDArray[np.bool_]:
    """Which of the kept tokens form the smallest most probable set with mass >= top_p."""
    weights = np.exp(scaled[kept] - scaled[kept].max()).astype(np.float64)
    tail = (1.0 - top_p) * weights.sum()
    # Tokens this light cannot add up to the tail even together: they go without being sorted.
    heavy = np.flatnonzero(weights * len(kept) >= tail)
    light_sum = weights.sum() - weights[heavy].sum()
    # Lightest first, and among equals the highest id first, so that the lowest id stays.
    order = heavy[np.lexsort((-heavy, weights[heavy]))]
    removed = light_sum + np.cumsum(weights[order]) <= tail
    removed[-1:] = False
    mask = np.zeros(len(kept), dtype=np.bool_)
    mask[order[~removed]] = True
    return mask


def surviving_tokens(
    logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.intp], Floats]:
    """Tokens that the filters leave, and their logits over the temperature.

    logits: float32 [V], processed (bias, masks, penalties). temperature > 0. top_k 0 = off,
    top_p 1 = off, min_p 0 = off. Applied in transformers' order: temperature, top-k (ties with the
    k-th are kept), top-p, min-p.
    Returns ids [K] ascending and float32 [K] scaled logits relative to the largest, K >= 1.
    Raises ValueError if the row has a NaN, a +inf or no finite logit.
    """
    best = logits.max()
    if not np.isfinite(best):
        raise ValueError(f"the logits of a row are not finite (maximum {best})")
    with np.errstate(over="ignore"):
        scaled = (logits - best) / np.float32(max(temperature, 1e-30))
    if 0 < top_k < len(scaled):
        kth = np.partition(scaled, len(scaled) - top_k)[len(scaled) - top_k]
        kept = np.flatnonzero((scaled >= kth) & (scaled > -np.inf))
    else:
        kept = np.flatnonzero(scaled > -np.inf)
    if top_p < 1.0:
        kept = kept[_top_p_mask(scaled, kept, top_p)]
    if min_p > 0.0:
        kept = kept[np.exp(scaled[kept]) >= np.float32(min_p)]
    return kept, scaled[kept]


def choose_token(
    logits: Floats,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
    stream: int = 0,
) -> int:
    """The law's token: argmax over the surviving x of z(x) / T + noise(seed, position, x).

    temperature 0 is argmax of the logits, whatever the filters. Ties go to the lowest id.
    position: absolute position of the token that is chosen (the first prompt token is at 0).
    stream: of the noise, see `philox_words`.
    Raises ValueError as surviving_tokens does.
    """
    if temperature == 0.0:
        token = int(np.argmax(logits))
        if not np.isfinite(logits[token]):
            raise ValueError(f"the logits of a row are not finite (maximum {logits[token]})")
        return token
    kept, scaled = surviving_tokens(logits, temperature, top_k, top_p, min_p)
    if len(kept) == 1:
        return int(kept[0])
    words = philox_words(seed, stream, position, int(kept[-1]) + 1)
    # Noise is at most _MAX_NOISE, so a token further below the best one's score cannot win.
    best = int(np.argmax(scaled))
    floor = scaled[best] + gumbel_noise(words[kept[best : best + 1]])[0] - _MAX_NOISE
    able = np.flatnonzero(scaled >= floor)
    scores = scaled[able] + gumbel_noise(words[kept[able]])
    return int(kept[able[np.argmax(scores)]])
