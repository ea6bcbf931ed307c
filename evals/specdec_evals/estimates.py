"""Medians and ratios of paired measurements, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap(samples: Floats, statistic: Callable[[Floats], Floats], *, seed: int = 0) -> Estimate:
    """The statistic of the samples and its percentile interval (Efron 1979), questions resampled.

    samples: [num_questions, num_columns] float64; a question's columns stay together.
    statistic: [..., num_questions, num_columns] -> [...].

    Raises ValueError without a sample.
    """
    if len(samples) == 0:
        raise ValueError("no sample to make an estimate from")
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(samples), size=(NUM_RESAMPLES, len(samples)))
    resampled = statistic(samples[picks])
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Estimate(float(statistic(samples)), float(low), float(high))


def median_of(values: Floats) -> Estimate:
    """Median over questions. values: [num_questions]."""
    return bootstrap(values[:, None], lambda samples: np.median(samples[..., 0], axis=-1))


def ratio_of_medians(values: Floats, base: Floats) -> Estimate:
    """Median of values over median of base, the pairs resampled together; both [num_questions]."""

    def ratio(samples: Floats) -> Floats:
        return np.asarray(np.median(samples[..., 0], axis=-1) / np.median(samples[..., 1], axis=-1))

    return bootstrap(np.stack([values, base], axis=-1), ratio)
