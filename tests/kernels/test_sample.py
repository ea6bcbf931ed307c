"""`sample` on the CPU: noise, penalties, log-probabilities and order against independent forms."""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.processors import LogitBias, OutputPenalties, RepetitionPenalty
from specdec.testing import assert_law
from specdec.testing.checks import chi_square_tail
from specdec_kernels import sample
from specdec_kernels.sample import (
    Penalties,
    choose_token,
    gumbel_noise,
    philox_words,
    surviving_tokens,
)
from specdec_kernels.sample.rows import penalise
from tests.kernels import sample_cases as cases
from tests.kernels.sample_cases import Rows, random_rows


@pytest.mark.parametrize(("counter", "key", "result"), cases.KNOWN_ANSWERS)
def test_published_vectors(counter: list[int], key: list[int], result: list[int]) -> None:
    """numpy advances its counter before use."""
    number = sum(word << (64 * i) for i, word in enumerate(counter))
    before = (number - 1) % 2**256
    start = np.array([(before >> (64 * i)) & cases.ALL for i in range(4)], dtype=np.uint64)
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=start)
    assert generator.random_raw(4).tolist() == result


def test_words_of_the_first_published_vector() -> None:
    result = cases.KNOWN_ANSWERS[0][2]
    assert philox_words(0, 0, 0, 8).tolist() == [
        half for word in result for half in (word & 0xFFFFFFFF, word >> 32)
    ]


@pytest.mark.parametrize("tokens", [1_000_000, 5_000])
def test_ten_million_words_are_uniform(tokens: int) -> None:
    """Of few positions and of many: the highest and the lowest ten bits; false alarms 1e-9 each."""
    counts = np.zeros((2, 1024))
    for position in range(10_000_000 // tokens):
        words = philox_words(1, 0, position, tokens)
        for shift, part in zip((22, 0), counts, strict=True):
            part += np.bincount((words >> shift) & 1023, minlength=1024)
    expected = 10_000_000 / 1024
    for part in counts:
        assert part.sum() == 10_000_000
        assert chi_square_tail(float(((part - expected) ** 2 / expected).sum()), 1023) > 1e-9


def test_neighbours_are_independent() -> None:
    """Pairs of tokens, positions, seeds and streams that differ by one fill 32 x 32 cells."""

    def cells(first: tuple[int, int, int], second: tuple[int, int, int], skip: int = 0) -> Any:
        a = philox_words(*first, 400_000)[: 400_000 - skip] >> np.uint32(27)
        b = philox_words(*second, 400_000)[skip:] >> np.uint32(27)
        return a * 32 + b

    law = [1 / 1024] * 1024
    assert_law(lambda t: cells((t, 0, 5), (t, 0, 5), 1)[::2], law)
    assert_law(lambda t: cells((t, 0, 5), (t, 0, 6)), law)
    assert_law(lambda t: cells((t, 0, 5), (t, 1, 5)), law)
    assert_law(lambda t: cells((t, 0, 5), (t + 1, 0, 5)), law)


def test_noise_is_within_two_ulp() -> None:
    """Of 1 where the noise is smaller: there it is what is left of a difference of logarithms."""
    words = cases.many_words(1_000_000)
    assert cases.ulps_off(gumbel_noise(words), words, least=1.0) <= 2.0


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_those_of_choose_token(seed: int) -> None:
    case = random_rows(seed, 300, 10)
    output = case.sample("reference")
    assert output.token_ids.dtype == torch.int64
    assert output.logprobs.dtype == torch.float32
    for j, row in enumerate(case.logits.numpy()):
        values = {name: tensor[j].item() for name, tensor in case.options.items()}
        token = choose_token(
            row, temperature=values["temperature"], top_k=values["top_k"], top_p=values["top_p"],
            min_p=values["min_p"], seed=values["seeds"] % 2**64,
            position=values["positions"] % 2**64,
        )  # fmt: skip
        assert output.token_ids[j] == token


@pytest.mark.parametrize("seed", range(4))
def test_log_probabilities_are_the_engines(seed: int) -> None:
    case = random_rows(seed, 200, 8)
    raw, processed = case.sample("auto"), case.sample("auto", logprobs="processed_logprobs")
    assert torch.equal(raw.token_ids, processed.token_ids)
    for j, row in enumerate(case.logits.numpy()):
        token = int(raw.token_ids[j])
        entry = token_logprobs(row, token, 0, as_logits=False)
        assert float(raw.logprobs[j]) == pytest.approx(entry.logprob, rel=1e-6, abs=1e-6)
        temperature = float(case.options["temperature"][j])
        if temperature == 0.0:
            assert processed.logprobs[j] == raw.logprobs[j]
            continue
        filters = [case.options[name][j].item() for name in ("top_k", "top_p", "min_p")]
        kept, scaled = surviving_tokens(row, temperature, *filters)
        at = int(np.flatnonzero(kept == token)[0])
        wanted = torch.from_numpy(scaled).double().log_softmax(0)[at]
        assert float(processed.logprobs[j]) == pytest.approx(float(wanted), rel=1e-6, abs=1e-6)


def test_penalties_are_the_engines() -> None:
    """Bit for bit, in the order of its processors."""
    draw, vocab_size = random.Random(0), 50
    for _ in range(40):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.choice([1, 20]))]
        output = [draw.randrange(vocab_size) for _ in range(draw.choice([0, 1, 30]))]
        bias = {draw.randrange(vocab_size): draw.choice([-1e30, -3.7, 0.1, 9.0]) for _ in range(5)}
        repetition, presence = draw.choice([1.0, 1.3, 0.6]), draw.choice([0.0, 0.7, -0.2])
        frequency = draw.choice([0.0, 0.33, -1.1])
        row = np.random.default_rng(draw.randrange(99)).standard_normal(vocab_size) * 4
        expected = row.astype(np.float32)
        actual = expected[None].copy()
        processors = [
            LogitBias(bias),
            RepetitionPenalty(repetition, prompt, vocab_size),
            OutputPenalties(presence, frequency, vocab_size),
        ]
        for processor in processors:
            for token in output:
                processor.append(token)
            processor.apply(expected)
        penalise(
            actual,
            Penalties.from_lists(
                [prompt], [output], [bias],
                repetition=[repetition], presence=[presence], frequency=[frequency],
            ),
        )  # fmt: skip
        assert np.array_equal(actual[0], expected)


def test_a_gpu_rounds_products_of_penalties_by_themselves() -> None:
    """A compiler that fuses them with the subtraction gives other bits than the engine's."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process is the interpreter's")
    from specdec_kernels.checks.measure import TARGETS, compile_for
    from specdec_kernels.sample.penalties_triton import penalty_configuration

    code = compile_for(penalty_configuration(), TARGETS["sm_90"]).asm["ptx"]
    assert "sub.f32" in code
    assert "fma" not in code


def test_choices_are_the_best_in_order() -> None:
    case = random_rows(0, 60, 4)
    case.options.update(temperature=torch.tensor([0.7, 1.0, 1.3, 1.0]))
    for name in ("top_k", "top_p", "min_p"):
        case.options[name] = None
    ids = case.sample("auto", num_choices=16).token_ids
    assert torch.equal(ids[:, :1], case.sample("auto", num_choices=1).token_ids)
    assert torch.equal(ids[:, 0], case.sample("auto").token_ids)
    for j, choices in enumerate(ids.tolist()):
        scores = cases.true_scores(case, j)
        choices = [token for token in choices if token >= 0]
        assert len(set(choices)) == min(16, int((scores > -np.inf).sum()))
        best = np.sort(scores)[::-1][: len(choices)]
        assert scores[choices] == pytest.approx(best, abs=1e-5)


def test_equal_scores_come_by_id_and_missing_ones_are_minus_one() -> None:
    logits = torch.tensor([[2.0, 3.0, -0.0, 3.0, 0.0, -float("inf")]])
    options = {name: torch.zeros(1, dtype=torch.int64) for name in ("seeds", "positions")}
    output = sample(logits, temperature=torch.zeros(1), num_choices=7, **options)
    assert output.token_ids.tolist() == [[1, 3, 0, 2, 4, -1, -1]]
    assert output.logprobs[0, 5:].tolist() == [-float("inf")] * 2


def test_rows_that_are_not_finite_are_reported() -> None:
    logits = torch.zeros(5, 9)
    logits[0, 3], logits[1, 5], logits[2] = float("nan"), float("inf"), -float("inf")
    case = Rows(logits, {**random_rows(1, 9, 5).options, "top_k": None})
    for temperature in (0.0, 1.0):
        output = case.sample("auto", temperature=torch.full((5,), temperature))
        assert output.token_ids[:3].tolist() == [-1] * 3
        assert output.logprobs[:3].tolist() == [-float("inf")] * 3
        assert int(output.token_ids[3:].min()) >= 0


def test_streams_differ_and_nothing_is_changed() -> None:
    case = random_rows(2, 400, 6, penalties=True)
    case.options["temperature"] = torch.full((6,), 1e4)  # noise decides
    for name in ("top_k", "top_p", "min_p"):
        case.options[name] = None
    before = case.logits.clone()
    tokens = [case.sample("auto", stream=stream).token_ids for stream in range(3)]
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[1], tokens[2])
    assert torch.equal(case.logits, before)
    assert case.logits.isnan().sum() == 0


@pytest.mark.parametrize("vocab_size", [7, 300])
def test_empty_calls(vocab_size: int) -> None:
    options = random_rows(0, vocab_size, 1).options
    empty = {name: tensor[:0] for name, tensor in options.items()}
    output = sample(torch.zeros(0, vocab_size), num_choices=3, **empty)
    assert output.token_ids.shape == output.logprobs.shape == (0, 3)


CASE = random_rows(0, 20, 3)


@pytest.mark.parametrize(
    ("match", "changed"),
    [
        ("temperature: must be torch.float32", {"temperature": torch.ones(3).double()}),
        (r"temperature: must be 0 or more, got -1.0 in row 1",
         {"temperature": torch.tensor([1.0, -1.0, 0.0])}),
        ("top_k: must be torch.int32", {"top_k": torch.ones(3).long()}),
        (r"top_k: must be 0 or more", {"top_k": torch.tensor([0, -1, 0]).int()}),
        (r"top_p: must be in 0\.\.1, got 1.5 in row 2", {"top_p": torch.tensor([1, 1, 1.5])}),
        (r"min_p: must be in 0\.\.1", {"min_p": torch.tensor([float("nan"), 0, 0])}),
        ("min_p: must be torch.float32", {"min_p": torch.ones(2)}),
        ("seeds: must be torch.int64", {"seeds": torch.ones(3).int()}),
        ("positions: must be on", {"positions": torch.ones(3).long().to("meta")}),
        ("seeds: must be contiguous", {"seeds": torch.ones(6).long()[::2]}),
        ("stream: must be 0", {"stream": 3}),
        (r"num_choices: must lie in 1\.\.16", {"num_choices": 17}),
        ("logprobs: must be", {"logprobs": "raw_logits"}),
        ("logits: must be float32", {"logits": torch.zeros(3, 20).double()}),
        (r"logits: must be \[J, V\]", {"logits": torch.zeros(3, 20, 1)}),
        ("logits: must be", {"logits": torch.zeros(3, 0)}),
        ('sample has no form "cpu"', {"impl": "cpu"}),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(match: str, changed: dict[str, Any]) -> None:
    arguments = {"logits": CASE.logits, **CASE.options, **changed}
    with pytest.raises(ValueError, match=match):
        sample(**arguments)


@pytest.mark.parametrize(
    ("match", "field", "value"),
    [
        ("penalties.token_ids: must lie in", "token_ids", [0, 20, 1]),
        ("penalties.token_ids: must lie in", "token_ids", [0, -1, 1]),
        ("penalties.token_ids: must be distinct", "token_ids", [4, 4, 1]),
        ("penalties.cu_tokens: must rise", "cu_tokens", [0, 3, 2, 3]),
        ("penalties.cu_tokens: must rise", "cu_tokens", [0, 1, 2, 2]),
        ("penalties.output_counts: must be", "output_counts", [1, 1]),
        ("penalties.repetition: must be", "repetition", [1.0]),
    ],
)
def test_bad_penalties_are_named(match: str, field: str, value: list[Any]) -> None:
    good = Penalties.from_lists(
        [[3, 3, 5], [], [7]], [[], [], []], [{}, {}, {}],
        repetition=[1.1] * 3, presence=[0.0] * 3, frequency=[0.0] * 3,
    )  # fmt: skip
    sample(CASE.logits, **CASE.options, penalties=good)
    tensor = torch.tensor(value, dtype=getattr(good, field).dtype)
    bad = dataclasses.replace(good, **{field: tensor})
    with pytest.raises(ValueError, match=match):
        sample(CASE.logits, **CASE.options, penalties=bad)


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one entry per row"):
        Penalties.from_lists([[1]], [[], []], [{}], repetition=[1.0], presence=[0.0],
                             frequency=[0.0])  # fmt: skip
