"""Tree attention over what its arguments may be, drawn at random, and over quantised caches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specdec_kernels import tree_attention
from specdec_kernels.testing import (
    RandomStep,
    assert_matches_low_precision_reference,
    dense_attention,
    quantised_step,
    random_step,
    random_tree,
)
from tests.kernels import exact_cases
from tests.kernels.forms import can_run, make_plan

FORMS = ["reference", "exact", "cpu"]


def draw(seed: int, *, longest: int) -> tuple[RandomStep, dict[str, Any]]:
    """A ragged step and layer options; every eighth has the longest context and tree."""
    rng = random.Random(seed)
    big = seed % 8 == 0
    lengths, parents = [], []
    for index in range(rng.randint(1, 5)):
        page_edge = rng.choice([0, 15, 16, 17, 63, 64, 65, 511, 512, 513, 527, 528])
        lengths.append(rng.choice([page_edge, rng.randrange(300)]))
        nodes = rng.choice([1, 2, 3, 16, 31, 64, 65])
        tree: list[int] | int = random_tree(rng, nodes)
        if big and index == 0:
            lengths[0], tree = rng.randrange(longest), random_tree(rng, rng.randint(100, 256))
        parents.append(rng.choice([tree, tree, tree, rng.randrange(70)]))
    kv_heads, groups = rng.randint(1, 4), rng.randint(1, 8)
    step = random_step(
        parents, lengths,
        num_heads=kv_heads * groups, num_kv_heads=kv_heads, head_dim=rng.choice(range(8, 257, 8)),
        page_size=rng.choice([1, 8, 16, 64]),
        dtype=rng.choice([torch.float32, torch.bfloat16, torch.float16]), seed=seed,
    )  # fmt: skip
    options: dict[str, Any] = {"scale": step.query.shape[2] ** -0.5}
    if rng.random() < 0.3:
        options["window"] = rng.choice([1, 16, 17, 100, 512, 513])
    if rng.random() < 0.3:
        options["softcap"] = rng.choice([1.0, 30.0])
    if rng.random() < 0.3:
        options["sinks"] = torch.randn(step.query.shape[1])
    return step, options


def check(seed: int, *, longest: int) -> None:
    step, options = draw(seed, longest=longest)
    high = dense_attention(step, **options)
    low = dense_attention(step, dtype=step.query.dtype, **options)
    for form in FORMS:
        if can_run(step.batch, form):
            # Poisoned results and stale buffers of a bigger step must not show.
            actual = exact_cases.run(step, form, options)
            assert_matches_low_precision_reference(actual, high, low, f"{form}, seed {seed}")


@pytest.mark.parametrize("seed", range(24))
def test_random_steps(seed: int) -> None:
    check(seed, longest=200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_random_steps(seed: int) -> None:
    check(seed, longest=5000)


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("seed", range(100, 108))
def test_quantised_caches(seed: int, kept: torch.dtype) -> None:
    """Against the dense oracle on what the numbers and scales mean."""
    step, options = draw(seed, longest=700)
    step, key_scales, value_scales = quantised_step(step, kept)
    high = dense_attention(step, **options)
    low = dense_attention(step, dtype=step.query.dtype, **options)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    for form in FORMS:
        if can_run(step.batch, form, key_scales):
            actual = exact_cases.run(step, form, options | scales)
            assert_matches_low_precision_reference(actual, high, low, f"{form}, seed {seed}")


@pytest.mark.parametrize("form", ["exact", "cpu"])
@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_rows_are_exact(form: str, kept: torch.dtype) -> None:
    """A node's row has the bits of the row decoded alone, as each token has a scale of its own."""
    for trial in exact_cases.trials(6, 3, most_committed=600, num_heads=4, num_kv_heads=2,
                                    head_dim=16):  # fmt: skip
        step, key_scales, value_scales = quantised_step(trial.step, kept)
        scales = {"key_scales": key_scales, "value_scales": value_scales}
        together = exact_cases.run(step, form, trial.options | scales)
        parents = trial.step.parents[0]
        assert isinstance(parents, list)
        for node in range(len(parents)):
            alone = exact_cases.alone_step(trial.step, node, as_chain=False)
            alone, *own_scales = quantised_step(alone, kept)
            scales = dict(zip(("key_scales", "value_scales"), own_scales, strict=True))
            expected = exact_cases.run(alone, form, trial.options | scales)[0]
            assert torch.equal(together[node], expected)


def test_scales_are_asked_for_and_checked() -> None:
    step = random_step([[-1, 0]], [5], num_heads=2, num_kv_heads=1, head_dim=8)
    quantised, key_scales, value_scales = quantised_step(step, torch.int8)
    plan = make_plan(step.batch, "cpu")
    arguments = (quantised.query, quantised.key_cache, quantised.value_cache, plan)
    good = {"key_scales": key_scales, "value_scales": value_scales}
    tree_attention(*arguments, scale=1.0, **good)
    for name, wrong in (
        ("key_scales", None),
        ("value_scales", None),
        ("key_scales", key_scales.double()),
        ("value_scales", value_scales[:, :4]),
        ("value_scales", value_scales.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        with pytest.raises(ValueError, match=name):
            tree_attention(*arguments, scale=1.0, **(good | {name: wrong}))
    with pytest.raises(
        ValueError, match=r"key_scales: must be None, as a torch.float32 cache has no scales"
    ):
        tree_attention(step.query, step.key_cache, step.value_cache, plan, scale=1.0, **good)
