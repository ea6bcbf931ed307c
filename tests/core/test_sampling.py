"""The law: its noise, its filters and penalties against transformers', ties, log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import SamplingParams
from specdec.sampling.law import TokenLaw
from specdec.testing import assert_law
from specdec_kernels.sample import choose_token, gumbel_noise, philox_words, surviving_tokens

MASK = 2**64 - 1


def philox_block(key: list[int], counter: list[int]) -> list[int]:
    """Philox4x64-10 in plain integers, from the paper's definition."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 2**64)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


@pytest.mark.parametrize("seed", [0, 1, MASK])
@pytest.mark.parametrize("position", [0, 1, 123456789])
@pytest.mark.parametrize("stream", [0, 2])
def test_words_are_philox_of_seed_stream_position_and_token(
    seed: int, stream: int, position: int
) -> None:
    words = philox_words(seed, stream, position, 45)
    expected = []
    for block in range(6):
        for word in philox_block([seed, stream], [block, position, 0, 0]):
            expected += [word & 0xFFFFFFFF, word >> 32]
    assert words.tolist() == expected[:45]


def test_noise_at_the_ends_of_the_range() -> None:
    words = np.array([0, 1, 0xFFFFFF7F, 0xFFFFFFFF], dtype=np.uint32)
    noise = gumbel_noise(words)
    exact = [-math.log(-math.log1p(-(w + 0.5) * 2.0**-32)) for w in (0, 1)]
    assert noise[:2].tolist() == pytest.approx(exact, rel=3e-7)
    assert -3.0 < noise[2] < -2.7  # the last word that is not rounded to u = 1
    assert noise[3] == -np.inf  # a loss; never +inf, which would be a token picked by accident
    assert not np.isnan(noise).any()


def test_noise_follows_the_gumbel_law() -> None:
    edges = [-math.log(-math.log(q / 20)) for q in range(1, 20)]

    def cells(attempt: int) -> list[int]:
        noise = gumbel_noise(philox_words(attempt, 0, 3, 200_000)).astype(np.float64)
        return np.searchsorted(edges, noise).tolist()

    assert_law(cells, [1 / 20] * 20)


@pytest.mark.slow
def test_no_word_at_all_gives_nan_or_too_much_noise() -> None:
    for start in range(0, 2**32, 2**24):
        words = np.arange(start, start + 2**24, dtype=np.int64).astype(np.uint32)
        noise = gumbel_noise(words)
        assert noise.max() < 23.0  # False for a NaN as well


def draws_outside(num_draws: int, vocab_size: int = 49_152) -> int:
    """Draws that leave the ten tokens that hold all the mass (the others 1e-13 each)."""
    logits = np.full(vocab_size, -30.0, dtype=np.float32)
    inside = np.arange(10) * 4_001 + 5
    logits[inside] = 0.0
    allowed = set(inside.tolist())
    outside = 0
    for position in range(num_draws):
        outside += choose_token(logits, temperature=1.0, position=position) not in allowed
    return outside


def test_no_draw_leaves_the_tokens_with_all_the_mass() -> None:
    assert draws_outside(2_000) == 0


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_two_million_draws_stay_inside() -> None:
    """The form with two plain logarithms fails this about three thousand times."""
    assert draws_outside(2_000_000) == 0


def test_a_lone_or_losing_survivor_is_still_chosen() -> None:
    logits = np.array([-np.inf, -np.inf, 0.0, -np.inf], dtype=np.float32)
    assert choose_token(logits, temperature=1.0) == 2


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    logits = np.array([1.0, 3.0, 2.0, -5.0], dtype=np.float32)
    assert choose_token(logits, temperature=temperature, position=3) == 1


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.array([0.0, 2.0, 2.0, 1.0, 2.0], dtype=np.float32)
    assert choose_token(logits, temperature=0.0) == 1
    kept, _ = surviving_tokens(logits, 1.0, 0, 0.2, 0.0)
    assert kept.tolist() == [1]
    kept, _ = surviving_tokens(logits, 1.0, 1, 1.0, 0.0)
    assert kept.tolist() == [1, 2, 4]  # ties with the k-th are kept, as transformers keeps them


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(bad: list[float], temperature: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        choose_token(np.array(bad, dtype=np.float32), temperature=temperature)


def test_the_smallest_top_p_still_leaves_the_best_token() -> None:
    for logits in (np.zeros(7, dtype=np.float32), random_logits(0)):
        kept, _ = surviving_tokens(logits, 1.0, 0, 1e-17, 0.0)
        assert kept.tolist() == [int(np.argmax(logits))]


def random_logits(seed: int, vocab_size: int = 997) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32) * 3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (50, 0.8, 0.05), (1, 0.5, 0.5),
     (0, 0.01, 0.0), (0, 0.999, 0.0)],
)  # fmt: skip
def test_filters_keep_what_transformers_keeps(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    for seed in range(20):
        logits = random_logits(seed)
        scores = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits)[None])[0]
        kept, scaled = surviving_tokens(logits, temperature, top_k, top_p, min_p)
        assert kept.tolist() == torch.isfinite(scores).nonzero().flatten().tolist()
        shift = scaled - scores[kept].numpy()
        assert np.ptp(shift) < 1e-4


def law(prompt: list[int], vocab_size: int, **params: object) -> TokenLaw:
    resolved = SamplingParams(**params).resolved({}, seed=1)  # type: ignore[arg-type]
    return TokenLaw(resolved, prompt, vocab_size, "raw_logprobs")


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_are_of_the_chosen_row(mode: str) -> None:
    params = SamplingParams(temperature=0.5, top_k=5, logprobs=3).resolved({}, seed=1)
    choice = TokenLaw(params, [0], 100, mode).choose(random_logits(4, 100), 1)
    entry = choice.logprobs
    assert entry is not None
    row = torch.from_numpy(random_logits(4, 100))
    if mode == "processed_logprobs":
        row = TopKLogitsWarper(5)(torch.zeros(1, 1).long(), (row / 0.5)[None])[0]
    expected = row.log_softmax(-1)
    assert entry.logprob == pytest.approx(float(expected[choice.token_id]), abs=1e-5)
    values, ids = expected.topk(3)
    assert list(entry.top) == ids.tolist()
    assert list(entry.top.values()) == pytest.approx(values.tolist(), abs=1e-5)
    assert entry.rank == 1 + int((expected > expected[choice.token_id]).sum())


def test_zero_logprobs_report_the_chosen_token_alone() -> None:
    choice = law([0], 100, temperature=0, logprobs=0).choose(random_logits(0, 100), 1)
    assert choice.logprobs is not None
    assert choice.logprobs.top == {}
    assert choice.logprobs.rank == 1
