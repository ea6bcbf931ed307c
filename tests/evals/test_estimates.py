"""Medians, ratios and their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_evals.estimates import bootstrap, median_of, ratio_of_medians


def test_median_and_interval_of_known_values() -> None:
    estimate = median_of(np.array([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert estimate.value == 3.0
    assert 1.0 <= estimate.low <= 3.0 <= estimate.high <= 100.0


def test_interval_of_equal_values_has_no_width() -> None:
    estimate = median_of(np.full(9, 7.0))
    assert (estimate.value, estimate.low, estimate.high) == (7.0, 7.0, 7.0)


def test_ratio_keeps_pairs_together() -> None:
    """Speeds differ by a factor of 100 between questions, the ratio by nothing."""
    base = np.array([1.0, 3.0, 10.0, 40.0, 100.0])
    estimate = ratio_of_medians(1.5 * base, base)
    assert estimate.low == pytest.approx(1.5)
    assert estimate.high == pytest.approx(1.5)


def test_ratio_is_of_the_medians() -> None:
    estimate = ratio_of_medians(np.array([2.0, 4.0, 90.0]), np.array([1.0, 8.0, 2.0]))
    assert estimate.value == 2.0


@pytest.mark.statistical
def test_interval_covers_the_true_median() -> None:
    """400 draws of 60 normal values: 95 % intervals cover 0 in 360 to 396 (false alarm < 1e-4)."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        estimate = median_of(generator.normal(size=60))
        covered += estimate.low <= 0.0 <= estimate.high
    assert 360 <= covered <= 396


def test_no_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="no sample"):
        bootstrap(np.empty((0, 1)), lambda samples: samples.mean((-1, -2)))
