"""Judges: laws by chi-square, texts against transformers, pages against the pool."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MIN_EXPECTED = 5.0
"""Cells that expect fewer samples are merged before the chi-square."""


@dataclass(frozen=True, slots=True)
class LawCheck:
    """Result of a chi-square test: the statistic, its degrees of freedom and its tail."""

    statistic: float
    degrees: int
    p_value: float


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Probability that a chi-square variable of `degrees` degrees exceeds `statistic`."""
    if degrees == 0:
        return 1.0 if statistic <= 0 else 0.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def law_check(samples: Sequence[int], law: Sequence[float]) -> LawCheck:
    """Chi-square of samples (cell indices) against the exact law, cells under 5 merged.

    A sample in a cell of probability zero, or outside the law, gives p = 0 at once.
    """
    probabilities = np.asarray(law, dtype=np.float64)
    values = np.asarray(samples, dtype=np.int64)
    size = len(probabilities)
    if len(values) == 0:
        raise ValueError("law_check needs samples")
    if values.min() < 0 or values.max() >= size or (probabilities[values] <= 0).any():
        return LawCheck(math.inf, size - 1, 0.0)
    counts = np.bincount(values, minlength=size).astype(np.float64)
    expected = probabilities * len(values)
    observed_cells: list[float] = []
    expected_cells: list[float] = []
    pool_observed = pool_expected = 0.0
    for cell in np.argsort(expected, kind="stable"):
        pool_observed += counts[cell]
        pool_expected += expected[cell]
        if pool_expected >= MIN_EXPECTED:
            observed_cells.append(pool_observed)
            expected_cells.append(pool_expected)
            pool_observed = pool_expected = 0.0
    if pool_expected > 0:  # the largest cell itself is small
        observed_cells.append(pool_observed)
        expected_cells.append(pool_expected)
    observed, wanted = np.array(observed_cells), np.array(expected_cells)
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    degrees = len(observed) - 1
    return LawCheck(statistic, degrees, chi_square_tail(statistic, degrees))


def assert_law(
    sample: Callable[[int], Sequence[int]],
    law: Sequence[float],
    *,
    alpha: float = 1e-5,
    label: str = "",
) -> None:
    """T5: fail if the samples' chi-square tail is below alpha twice running.

    sample: of an attempt number (0, then 1; use other seeds), cell indices. Raises AssertionError.
    """
    tails = []
    for attempt in range(2):
        result = law_check(sample(attempt), law)
        if result.p_value >= alpha:
            return
        tails.append(result)
    raise AssertionError(f"{label or 'law'}: samples do not follow it: {tails}")


def reference_generate(
    model: Any, prompt_ids: Sequence[int], max_new_tokens: int, **generation_fields: Any
) -> list[int]:
    """Plain transformers greedy: the new ids after prompt_ids, an ending EOS included.

    model: a transformers causal LM. generation_fields go to `generate` (eos_token_id,
    repetition_penalty, ...).
    """
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    fields = {"do_sample": False, "pad_token_id": 0, **generation_fields}
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **fields
        )
    return [int(token) for token in output[0, len(prompt_ids) :]]


def bf16_step(value: float) -> float:
    """Distance between value and the next bf16 number away from zero."""
    return float(2.0 ** (math.floor(math.log2(max(abs(value), 2.0**-126))) - 7))


@dataclass(frozen=True, slots=True)
class TeacherForced:
    """T7 verdict of one output: how many tokens were judged, how many were not the argmax, the
    largest distance below it in bf16 steps, and the positions beyond the allowed one.
    """

    num_tokens: int
    num_near_ties: int
    worst: float
    violations: tuple[int, ...]


def teacher_forced_check(
    model: Any,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    steps: float = 2.0,
    second_opinion: Any = None,
) -> TeacherForced:
    """T7: feed the output through `model`; each token must be its argmax or within `steps` bf16
    steps (of the argmax's logit) of it.

    second_opinion: the same weights in fp32, asked about tokens that fail. Two bf16 evaluations of
    one row lie on either side of the exact one, so a token that is within the steps of the exact
    argmax may be further from that of one of them.
    """
    near, violations = 0, []
    gaps = _steps_below_argmax(model, prompt_ids, output_ids)
    if second_opinion is not None and max(gaps, default=0.0) > steps:
        exact = _steps_below_argmax(second_opinion, prompt_ids, output_ids)
        gaps = [min(pair) if pair[0] > steps else pair[0] for pair in zip(gaps, exact, strict=True)]
    for position, gap in enumerate(gaps):
        if gap > steps:
            violations.append(position)
        elif gap > 0:
            near += 1
    return TeacherForced(len(output_ids), near, max(gaps, default=0.0), tuple(violations))


def _steps_below_argmax(
    model: Any, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> list[float]:
    """How far below the best logit each output token's is, in bf16 steps of the best."""
    tokens = [*prompt_ids, *output_ids]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens], device=model.device)).logits[0].float()
    rows = logits[len(prompt_ids) - 1 : len(tokens) - 1]
    return [
        (float(row.max()) - float(row[token])) / bf16_step(float(row.max()))
        for row, token in zip(rows, output_ids, strict=True)
    ]


def page_check(engine: Any, num_used_at_start: int | None = None) -> int:
    """T6: integrity, and free + used = all pages (cached ones are free); returns the used pages.

    num_used_at_start: if given, the used pages must be back at it. Raises AssertionError.
    """
    engine.check_integrity()
    counters = engine.counters
    used = int(counters.num_used_pages)
    assert counters.num_free_pages + used == counters.num_pages, counters
    assert counters.num_cached_pages <= counters.num_free_pages, counters
    if num_used_at_start is not None:
        assert used == num_used_at_start, (
            f"{used} pages in use, {num_used_at_start} at the start: {engine.page_owners()}"
        )
    return used
