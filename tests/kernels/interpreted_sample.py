"""`sample` in Triton's interpreter; `test_triton.py` runs this file in a process of its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from specdec_kernels.sample import gumbel_noise, philox_words
from specdec_kernels.sample.base import RowOptions
from specdec_kernels.sample.penalties_triton import triton_penalise
from specdec_kernels.sample.philox_triton import ROUGH_SLACK, rough_noise, token_words
from specdec_kernels.sample.philox_triton import gumbel_noise as triton_noise
from specdec_kernels.sample.rows import penalise
from specdec_kernels.sample.triton import triton_sample
from tests.kernels import sample_cases as cases
from tests.kernels.sample_cases import Rows, assert_same_logprobs, assert_same_tokens, random_rows

# The word that rounds to u = 1 has noise -inf by logarithms of zero; tiny temperatures overflow.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log"),
    pytest.mark.filterwarnings("ignore:overflow encountered in divide"),
]

VOCAB_SIZES = [1, 9, 1023, 1025, 5000]
MORE_VOCAB_SIZES = [1, 2, 8, 100, 1024, 2500, 5000]


# fmt: off
@triton.jit
def philox_kernel(counter_ptr, key_ptr, out_ptr):
    zero = tl.zeros([2], tl.uint64)
    w0, w1, w2, w3 = tl.philox_impl(
        zero + tl.load(counter_ptr), zero + tl.load(counter_ptr + 1),
        zero + tl.load(counter_ptr + 2), zero + tl.load(counter_ptr + 3),
        tl.load(key_ptr), tl.load(key_ptr + 1),
    )
    lane = tl.arange(0, 2)
    tl.store(out_ptr + lane, w0)
    tl.store(out_ptr + 2 + lane, w1)
    tl.store(out_ptr + 4 + lane, w2)
    tl.store(out_ptr + 6 + lane, w3)


@triton.jit
def words_kernel(key_ptr, out_ptr, first_block, BLOCKS: tl.constexpr):
    seed = tl.load(key_ptr)
    words = token_words(seed, tl.load(key_ptr + 1), tl.load(key_ptr + 2), first_block, BLOCKS)
    tl.store(out_ptr + tl.arange(0, 8 * BLOCKS), words)


@triton.jit
def noise_kernel(words_ptr, noise_ptr, rough_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at)
    tl.store(noise_ptr + at, triton_noise(words))
    tl.store(rough_ptr + at, rough_noise(words))
# fmt: on


def unsigned(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint64))


@pytest.mark.parametrize(("counter", "key", "result"), cases.KNOWN_ANSWERS)
def test_published_vectors(counter: list[int], key: list[int], result: list[int]) -> None:
    out = torch.zeros(8, dtype=torch.uint64)
    philox_kernel[(1,)](unsigned(counter), unsigned(key), out)
    assert out.tolist() == [word for word in result for _ in range(2)]


@pytest.mark.parametrize("key", cases.KEYS, ids=str)
def test_words_are_numpys(key: tuple[int, int, int]) -> None:
    seed, stream, position = key
    expected = philox_words(seed, stream, position, 8 * (3 + 16))
    out = torch.zeros(8 * 16, dtype=torch.uint32)
    words_kernel[(1,)](unsigned(list(key)), out, 3, BLOCKS=16)
    assert np.array_equal(out.numpy(), expected[24:])


def test_noise_is_within_two_ulp() -> None:
    words = cases.many_words(20_000)
    words = np.pad(words, (0, -len(words) % 4096))
    noise, rough = torch.zeros(2, len(words)).unbind()
    noise_kernel[(len(words) // 4096,)](torch.from_numpy(words), noise, rough, BLOCK=4096)
    assert cases.ulps_off(noise.numpy(), words, least=0.0) <= 2.0
    assert bool((rough + ROUGH_SLACK.value >= noise).all())
    assert bool((rough.abs() < 23).all())


def check(case: Rows, **changed: object) -> None:
    actual = case.sample("triton", **changed)
    expected = case.sample("reference", **changed)
    assert_same_tokens(case, actual.token_ids, expected.token_ids)
    if torch.equal(actual.token_ids, expected.token_ids):
        assert_same_logprobs(actual.logprobs, expected.logprobs)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_random_rows(vocab_size: int) -> None:
    check(random_rows(vocab_size, vocab_size, 3), num_choices=16)


def test_filters_leave_the_same_tokens() -> None:
    """More choices than survivors, so that the tokens that come out are all that are left."""
    logits = random_rows(0, 40, 5).logits.clamp(-9, 9)
    logits[2] = logits[0].flip(0)
    logits[3:] = logits[3:].round()  # ties
    options = {
        "temperature": torch.tensor([1.0, 0.8, 2.0, 3.0, 30.0]),
        "top_k": torch.tensor([5, 0, 0, 7, 14], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.7, 1.0, 0.8, 0.5]),
        "min_p": torch.tensor([0.0, 0.0, 0.6, 0.0, 0.9]),
        "seeds": torch.arange(5),
        "positions": torch.arange(5),
    }
    case = Rows(logits, options)
    expected = case.sample("reference", num_choices=16, logprobs="processed_logprobs")
    actual = case.sample("triton", num_choices=16, logprobs="processed_logprobs")
    assert int((expected.token_ids == -1).sum(1).min()) > 0
    assert torch.equal(actual.token_ids, expected.token_ids)
    assert_same_logprobs(actual.logprobs, expected.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(18))
@pytest.mark.parametrize("vocab_size", MORE_VOCAB_SIZES)
def test_more_random_rows(vocab_size: int, seed: int) -> None:
    case = random_rows(seed, vocab_size, 10, penalties=seed % 2 == 1)
    dtype = [torch.float32, torch.bfloat16, torch.float16][seed % 3]
    case = Rows(case.logits.clamp(-6e4, 6e4).to(dtype), case.options)
    mode = ["raw_logprobs", "processed_logprobs"][seed % 2]
    check(case, num_choices=[None, 1, 3, 16][seed % 4], logprobs=mode, stream=seed % 3)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_choices_in_order(mode: str) -> None:
    check(random_rows(4, 40, 3), num_choices=16, logprobs=mode, stream=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_and_rows_that_are_views(dtype: torch.dtype) -> None:
    case = random_rows(8, 2 * 300, 2)
    wide = case.logits.clamp(-6e4, 6e4).to(dtype)
    check(Rows(wide[:, :300], case.options))
    check(Rows(wide[:, ::2], case.options))


def test_penalties() -> None:
    for vocab_size in (30, 1500):
        case = random_rows(vocab_size, vocab_size, 2, penalties=True)
        expected = case.logits.numpy().copy()
        penalise(expected, case.options["penalties"])
        before = case.logits.clone()
        actual = triton_penalise(case.logits, case.options["penalties"])
        assert np.array_equal(actual.numpy(), expected)
        assert torch.equal(case.logits, before)
        check(case)


def test_rows_that_are_not_finite() -> None:
    logits = torch.zeros(5, 20)
    logits[0, 3], logits[1, 5], logits[2] = float("nan"), float("inf"), -float("inf")
    logits[3, 0] = -float("nan")
    options = {**random_rows(0, 20, 5).options, "temperature": torch.tensor([1.0, 0, 1, 0, 1])}
    case = Rows(logits, options)
    expected = case.sample("reference")
    for mode in ("raw_logprobs", "processed_logprobs"):
        output = case.sample("triton", logprobs=mode)
        assert output.token_ids[:4].tolist() == [-1] * 4
        assert output.logprobs[:4].tolist() == [-float("inf")] * 4
        assert torch.equal(output.token_ids, expected.token_ids)


def test_equal_scores_come_by_id_and_missing_ones_are_minus_one() -> None:
    """The two zeros are equal."""
    logits = torch.tensor([[2.0, 3.0, -0.0, 3.0, 0.0, -float("inf")]])
    options = {name: torch.zeros(1, dtype=torch.int64) for name in ("seeds", "positions")}
    case = Rows(logits, {"temperature": torch.zeros(1), **options})
    output = case.sample("triton", num_choices=7)
    assert output.token_ids.tolist() == [[1, 3, 0, 2, 4, -1, -1]]
    assert output.logprobs[0, 5:].tolist() == [-float("inf")] * 2


def test_a_survivor_with_lost_noise_is_still_chosen() -> None:
    """The word of this token rounds to u = 1."""
    seed, position, token = 18, 22314, 144
    assert gumbel_noise(philox_words(seed, 0, position, token + 1))[token] == -np.inf
    logits = torch.full((1, token + 1), -float("inf"))
    logits[0, token] = 0.0
    options = {
        "temperature": torch.ones(1),
        "seeds": torch.tensor([seed]),
        "positions": torch.tensor([position]),
    }
    case = Rows(logits, options)
    assert case.sample("triton").token_ids.tolist() == [token]
    logits[0, :5] = -1000.0
    check(case, num_choices=8)


def test_bits_depend_on_neither_block_nor_other_rows() -> None:
    case = random_rows(3, 600, 3)
    whole = case.sample("triton", num_choices=3, logprobs="processed_logprobs")
    options = RowOptions(
        **{name: case.options[name] for name in RowOptions._fields[:6]},
        stream=0, penalties=None, num_choices=3, logprobs="processed_logprobs",
    )  # fmt: skip
    other = triton_sample(case.logits, options, BLOCK=256)
    for j in range(3):
        row = {name: value[j : j + 1] for name, value in case.options.items()}
        alone = Rows(case.logits[j : j + 1], row).sample(
            "triton", num_choices=3, logprobs="processed_logprobs"
        )
        for actual in (alone, [part[j : j + 1] for part in other]):
            assert torch.equal(actual[0], whole.token_ids[j : j + 1])
            assert torch.equal(actual[1], whole.logprobs[j : j + 1])


@pytest.mark.parametrize("fault", ["stream", "position", "seed"])
def test_wrong_noise_is_noticed(fault: str) -> None:
    """The comparison above fails if a form mixes up what its noise depends on."""
    case = plain_rows(200)
    changed = {
        "stream": {"stream": 1},
        "position": {"positions": case.options["positions"] + 1},
        "seed": {"seeds": case.options["seeds"] ^ (1 << 40)},
    }[fault]
    expected = case.sample("reference").token_ids
    assert_same_tokens(case, case.sample("triton").token_ids, expected)
    with pytest.raises(AssertionError, match="score"):
        assert_same_tokens(case, case.sample("triton", **changed).token_ids, expected)


def plain_rows(vocab_size: int) -> Rows:
    draw = random.Random(1)
    options = {
        "temperature": torch.ones(3),
        "seeds": torch.tensor([draw.getrandbits(62) for _ in range(3)]),
        "positions": torch.tensor([5, 2**35, 9]),
    }
    return Rows(random_rows(0, vocab_size, 3).logits.clamp(-3, 3), options)
