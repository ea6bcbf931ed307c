"""Random rows, judges and published vectors for the tests of `sample`, on the CPU and in Triton."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec_kernels import sample
from specdec_kernels.sample import Penalties, SampleOutput, gumbel_noise, philox_words
from specdec_kernels.sample.rows import penalise

ALL = 2**64 - 1

# Random123, tests/kat_vectors, philox4x64 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2,
     [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]),
    ([ALL] * 4, [ALL] * 2,
     [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]),
    ([0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
     [0x452821E638D01377, 0xBE5466CF34E90C6C],
     [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6]),
]  # fmt: skip

KEYS = [
    (seed, stream, position)
    for seed in (0, 1, 2**32 + 5, 2**63, ALL)
    for stream, position in ((0, 0), (1, 1), (2, 2**32 - 1), (0, 2**32 + 1), (1, 2**63 + 9))
] + [(7, 0, ALL)]

SPECIAL_WORDS = [
    0,
    1,
    2,
    255,
    2**24 - 1,
    2**24,
    2**31,
    0xFFFFFF7E,
    0xFFFFFF7F,
    0xFFFFFF80,
    2**32 - 1,
]


def many_words(count: int) -> NDArray[np.uint32]:
    """Special words, random ones, and random ones of every magnitude from both ends."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, count, dtype=np.uint32)
    shifted = words >> rng.integers(0, 32, count, dtype=np.uint32)
    near_zero = np.uint32(2714937127) + np.arange(-500, 500).astype(np.uint32)  # noise of 1e-7
    return np.concatenate(
        [np.array(SPECIAL_WORDS, dtype=np.uint32), words, shifted, ~shifted, near_zero]
    )


def true_noise(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """The noise of u = (word + 1/2) / 2**32 as rounded to fp32, in fp64."""
    uniform = ((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)).astype(float)
    with np.errstate(divide="ignore"):
        return -np.log(-np.log1p(-uniform))


def ulps_off(noise: NDArray[np.float32], words: NDArray[np.uint32], least: float) -> float:
    """The largest error in steps of fp32 at the true noise, or at `least` where that is larger.

    Words that round to u = 1 must give -inf and no other may.
    """
    truth = true_noise(words)
    lost = truth == -np.inf
    assert np.array_equal(noise == -np.inf, lost)
    step = np.spacing(np.maximum(np.abs(truth[~lost]), least).astype(np.float32)).astype(float)
    return float((np.abs(noise[~lost] - truth[~lost]) / step).max())


@dataclass(frozen=True)
class Rows:
    """Arguments of one call: logits [J, V] and everything that `sample` takes by name."""

    logits: Tensor
    options: dict[str, Any]

    def sample(self, impl: str, **changed: Any) -> SampleOutput:
        return sample(self.logits, impl=impl, **{**self.options, **changed})  # type: ignore[arg-type]


def _row(rng: np.random.Generator, vocab_size: int, kind: str) -> NDArray[np.float32]:
    row = rng.standard_normal(vocab_size) * 3
    if kind == "ties":
        row = np.round(row / 2)
    elif kind == "equal":
        row = np.full(vocab_size, -0.0) + np.where(rng.random(vocab_size) < 0.5, 0.0, -0.0)
    elif kind == "masked":
        row[rng.random(vocab_size) < 0.7] = -np.inf
        row[rng.integers(vocab_size)] = 1.0
    elif kind == "spread":
        row = row * 1e4
    return row.astype(np.float32)


KINDS = ["normal", "ties", "equal", "masked", "spread"]


def random_rows(seed: int, vocab_size: int, num_rows: int, *, penalties: bool = False) -> Rows:
    """Rows of every kind with parameters drawn from lists that hold the ends of every range."""
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    rows = [_row(rng, vocab_size, KINDS[(seed + j) % len(KINDS)]) for j in range(num_rows)]

    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor([draw.choice(values) for _ in rows], dtype=dtype)

    top_ks = [0, 1, 2, max(vocab_size // 3, 1), max(vocab_size - 1, 1), vocab_size, vocab_size + 9]
    options: dict[str, Any] = {
        "temperature": column([0.0, 1e-35, 0.3, 1.0, 1.0, 1.7, 1e4], torch.float32),
        "top_k": column(top_ks, torch.int32),
        "top_p": column([1.0, 1.0, 1e-17, 0.2, 0.5, 0.9, 0.999, 0.0], torch.float32),
        "min_p": column([0.0, 0.0, 0.02, 0.5, 1.0], torch.float32),
        "seeds": column([0, 1, -1, 2**40, -(2**63), 12345], torch.int64),
        "positions": column([0, 1, 77, 2**33, -3], torch.int64),
    }
    if penalties:
        options["penalties"] = random_penalties(draw, vocab_size, num_rows)
    return Rows(torch.from_numpy(np.array(rows)), options)


def random_penalties(draw: random.Random, vocab_size: int, num_rows: int) -> Penalties:
    """Prompts and outputs of many tokens, which overlap, and biases; every row its own."""
    lengths = [min(draw.choice([0, 3, 600]), vocab_size) for _ in range(num_rows)]

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    return Penalties.from_lists(
        [tokens(n) for n in lengths],
        [tokens(n) for n in lengths],
        [{token: draw.choice([-1e9, -2.5, 0.1, 7.0]) for token in tokens(4)} for _ in lengths],
        repetition=[draw.choice([1.0, 1.3, 0.7]) for _ in lengths],
        presence=[draw.choice([0.0, 0.3, -1.7]) for _ in lengths],
        frequency=[draw.choice([0.0, 0.1, 2.0]) for _ in lengths],
    )


def assert_same_tokens(case: Rows, actual: Tensor, expected: Tensor) -> None:
    """Equal, or both tokens score the same within the rounding of noise and sum.

    The bound is four steps of fp32 at the larger of 1, the noise and the score: two for each form's
    noise. A token that the filters remove is no tie.
    """
    assert actual.shape == expected.shape
    for j, *rest in (actual != expected).nonzero().tolist():
        pair = np.array([int(actual[(j, *rest)]), int(expected[(j, *rest)])])
        assert pair.min() >= 0, f"row {j}: tokens {pair}"
        scores = true_scores(case, j)[pair]
        bound = 4 * np.spacing(np.float32(max(23.0, np.abs(scores).max())))
        assert abs(scores[0] - scores[1]) <= bound, f"row {j}: tokens {pair} score {scores}"


def true_scores(case: Rows, j: int) -> NDArray[np.float64]:
    """Scores of row j in fp64, before filters."""
    row = case.logits.float().numpy().copy()
    if case.options.get("penalties") is not None:
        penalise(row, case.options["penalties"])
    row = row[j].astype(float)
    temperature = float(case.options["temperature"][j])
    seed, position = (int(case.options[name][j]) & ALL for name in ("seeds", "positions"))
    if temperature == 0.0:
        return row
    words = philox_words(seed, case.options.get("stream", 0), position, len(row))
    return (row - row.max()) / max(temperature, 1e-30) + gumbel_noise(words).astype(float)


def assert_same_logprobs(actual: Tensor, expected: Tensor) -> None:
    """To fp32 accuracy; -inf for tokens that are missing."""
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-6)
