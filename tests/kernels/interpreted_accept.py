"""`accept` in Triton's interpreter; `test_triton.py` runs this file in a process of its own."""

from __future__ import annotations

import pytest

from specdec_kernels import accept
from specdec_kernels.accept.triton import triton_accept
from tests.kernels import accept_cases as cases

CHAINS = [0, 1, 2, 63, 64, 65, 200, 256]


def check(step: cases.Step, max_depth: int = 255) -> int:
    """As it is shipped, a program per request."""
    return cases.check(step, accept(*step, max_depth=max_depth, impl="triton"), max_depth)


def check_many(step: cases.Step) -> int:
    """Many requests per program, which the interpreter computes much faster."""
    return cases.check(step, triton_accept(*step, 255, REQUESTS=512), 255)


def test_random_trees() -> None:
    assert check(cases.random_step(0, 50)) > 50


def test_ten_thousand_random_trees() -> None:
    for seed in range(1, 6):
        assert check_many(cases.random_step(seed, 2_000)) > 2_000


@pytest.mark.slow
def test_a_hundred_thousand_random_trees() -> None:
    for seed in range(10, 60):
        assert check_many(cases.random_step(seed, 2_000)) > 2_000


@pytest.mark.parametrize("max_depth", [0, 1, 15])
def test_deeper_nodes_are_passed_over(max_depth: int) -> None:
    check(cases.random_step(7, 20), max_depth)


@pytest.mark.parametrize("fails_at", [1, 64, 255, 256])
def test_chains(fails_at: int) -> None:
    """All rows match up to one; beside a tree of four words and without one."""
    rows = [token for n in CHAINS for token in range(n)]
    chosen = [-1 if token + 1 == fails_at else token + 1 for token in rows]
    check(cases.make_step(list(CHAINS), rows, chosen))
    tree = [-1] + [0] * 255
    check(cases.make_step([*CHAINS, tree], [*rows, *range(256)], [*chosen, *range(255, -1, -1)]))


def test_a_negative_token_matches_nothing() -> None:
    """A row that `sample` reports against a node that carries no token."""
    step = cases.make_step([[-1, 0, 0], 2], [1, -1, 5, 1, -1], [-1, 3, 3, -1, 3])
    assert check(step, 1) == 0


def test_no_requests_at_all() -> None:
    check(cases.make_step([], [], []), 3)
