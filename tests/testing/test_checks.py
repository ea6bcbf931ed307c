"""The judges accept what is right and, above all, reject what is not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.testing import (
    assert_law,
    bf16_step,
    chi_square_tail,
    law_check,
    page_check,
    reference_generate,
    teacher_forced_check,
    tiny_llama,
)

LAW = [0.5, 0.3, 0.2, 0.0]


def draws(law: list[float], count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).choice(len(law), count, p=law).tolist()
    return drawn


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"),
    [(3.841, 1, 0.05), (11.070, 5, 0.05), (29.588, 10, 0.001), (0.0, 3, 1.0), (0.0, 0, 1.0)],
)
def test_chi_square_tail_matches_the_tables(statistic: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=2e-3)


def test_two_degrees_are_exponential() -> None:
    assert chi_square_tail(50.0, 2) == pytest.approx(math.exp(-25.0), rel=1e-9)


def test_law_check_accepts_the_law_and_rejects_another() -> None:
    assert law_check(draws(LAW, 5000), LAW).p_value > 1e-3
    assert law_check(draws([0.45, 0.35, 0.2, 0.0], 5000), LAW).p_value < 1e-5


def test_law_check_p_values_are_uniform() -> None:
    tails = [law_check(draws(LAW, 500, seed), LAW).p_value for seed in range(300)]
    assert 0.4 < np.mean(tails) < 0.6
    assert 0.02 < np.mean([tail < 0.1 for tail in tails]) < 0.2


@pytest.mark.parametrize("stray", [3, 4, -1])
def test_one_impossible_sample_is_enough(stray: int) -> None:
    assert law_check([*draws(LAW, 500), stray], LAW).p_value == 0.0


def test_small_cells_are_merged() -> None:
    law = [0.9, *[0.1 / 50] * 50]
    result = law_check(draws(law, 600), law)
    assert result.degrees < 25
    assert result.p_value > 1e-3


def test_assert_law_fails_only_the_second_time() -> None:
    wrong, right = draws([0.2, 0.3, 0.5, 0.0], 2000), draws(LAW, 2000)
    assert_law(lambda attempt: [wrong, right][attempt], LAW)
    with pytest.raises(AssertionError, match="two: samples do not follow it"):
        assert_law(lambda attempt: wrong, LAW, label="two")


def test_bf16_step() -> None:
    assert bf16_step(1.0) == 2**-7
    assert bf16_step(-20.0) == 2**-3


def test_teacher_forced_check_finds_a_wrong_token() -> None:
    model: Any = tiny_llama()
    answer = reference_generate(model, [1, 2, 3], 20)
    assert teacher_forced_check(model, [1, 2, 3], answer).violations == ()
    answer[5] = (answer[5] + 1) % 512
    verdict = teacher_forced_check(model, [1, 2, 3], answer)
    assert 5 in verdict.violations
    # A second opinion that agrees changes nothing.
    assert teacher_forced_check(model, [1, 2, 3], answer, second_opinion=model) == verdict


def test_page_check_finds_lost_and_kept_pages() -> None:
    def engine(free: int, used: int) -> Any:
        counters = SimpleNamespace(
            num_free_pages=free, num_used_pages=used, num_cached_pages=0, num_pages=8
        )
        return SimpleNamespace(
            check_integrity=lambda: None, page_owners=lambda: {}, counters=counters
        )

    assert page_check(engine(6, 2)) == 2
    with pytest.raises(AssertionError):
        page_check(engine(5, 2))
    with pytest.raises(AssertionError, match="2 pages in use"):
        page_check(engine(6, 2), num_used_at_start=0)
