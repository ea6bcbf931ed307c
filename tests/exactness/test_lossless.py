"""Acceptance rules by exact enumeration, the product's walk among them.

The others are the published rules; the last two cases are wrong on purpose and prove that these
tests can fail.
"""

from __future__ import annotations

import pytest

from specdec.testing.enumeration import (
    Path,
    Sampler,
    block,
    independent,
    keep_likelier_of_two,
    most_probable,
    rejection,
    traversal,
    walk,
    without_replacement,
    worst_error,
)

SHAPES = [(2,), (2, 1), (2, 2), (3, 1), (1, 1)]
EXACT = 1e-12


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "sampler", [without_replacement, most_probable, independent], ids=lambda f: f.__name__
)
def test_walk_is_exact_for_any_tree(sampler: Sampler, shape: Path) -> None:
    # Independent draws may repeat a token: the tree then has it once, as TreeBuilder makes it.
    assert worst_error(shape, sampler, walk) < EXACT


def test_walk_is_exact_when_pruning_looks_at_values() -> None:
    assert worst_error((1,), keep_likelier_of_two, walk) < EXACT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("sampler", "mode"),
    [(without_replacement, "without"), (independent, "iid"), (most_probable, "point")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_rejection_is_exact_with_the_true_draft_law(
    sampler: Sampler, mode: str, shape: Path
) -> None:
    assert worst_error(shape, sampler, rejection(mode)) < EXACT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("sampler", "mode"),
    [(without_replacement, "without"), (independent, "iid"), (most_probable, "point")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_traversal_is_exact_with_the_true_draft_law(
    sampler: Sampler, mode: str, shape: Path
) -> None:
    assert worst_error(shape, sampler, traversal(mode)) < EXACT


def test_block_verification_is_exact_on_chains() -> None:
    assert worst_error((1, 1), without_replacement, block) < EXACT


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bug_of_deterministic_children_taken_for_draws_is_seen(shape: Path) -> None:
    assert worst_error(shape, most_probable, rejection("without")) > 1e-2


def test_bug_of_pruning_sampled_children_is_seen() -> None:
    assert worst_error((1,), keep_likelier_of_two, rejection("without")) > 1e-2
