"""A row's bits are its own: whatever is in the batch, the tree, the pages, the threads."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specdec_kernels import TreeBatch, plan_tree_attention, tree_attention
from specdec_kernels.testing import RandomStep, random_step
from specdec_kernels.tree_attention.cpu import is_compiled
from tests.kernels import exact_cases as cases

SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["exact", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_in_a_tree_is_the_row_decoded_alone(form: str, dtype: torch.dtype) -> None:
    if form == "cpu" and not is_compiled():
        pytest.skip("no compiler: the torch form of the CPU is not exact")
    count = 2000 if form == "cpu" and dtype == torch.float32 else 200
    differing, rows = cases.differing_rows(form, count, seed=1, dtype=dtype, **SHAPE)
    assert rows == count
    assert differing == 0


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_the_exact_layout_in_torch(head_dim: int, capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 rows, and the share that differs where nodes are read as they are stored."""
    shape = {"num_heads": 9, "num_kv_heads": 3, "head_dim": head_dim}
    differing, rows = cases.differing_rows("exact", 2000, seed=head_dim, **shape)
    fast, fast_rows = cases.differing_rows("torch", 500, seed=head_dim, **shape)
    with capsys.disabled():
        print(f"\nhead_dim {head_dim}: exact {differing} of {rows}, fast {fast} of {fast_rows}")
    assert differing == 0
    assert fast > 0, "the comparison cannot tell the layouts apart"


def test_the_comparison_finds_rows_that_differ() -> None:
    differing, _ = cases.differing_rows("torch", 100, seed=3, **SHAPE)
    assert differing > 20


def step_of(
    parents: list[list[int] | int], lengths: list[int], part: RandomStep | None = None
) -> RandomStep:
    """A random step whose first request is that of `part`."""
    step = random_step(parents, lengths, seed=5 if part is None else 6, page_size=4, **SHAPE)  # type: ignore[arg-type]
    if part is not None:
        rows = part.batch.cu_nodes_host[1]
        step.query[:rows] = part.query[:rows]
        pages = torch.tensor(step.batch.block_tables_host[0])
        old = torch.tensor(part.batch.block_tables_host[0])
        step.key_cache[pages] = part.key_cache[old]
        step.value_cache[pages] = part.value_cache[old]
    return step


@pytest.mark.parametrize("form", ["exact", "cpu"])
@pytest.mark.parametrize("window", [None, 20])
def test_other_requests_change_nothing(form: str, window: int | None) -> None:
    rng = random.Random(4)
    tree = cases.shallow_tree(rng, 12)
    options: dict[str, Any] = {"scale": 0.25, "window": window}
    alone = step_of([tree], [530])
    expected = cases.run(alone, form, options)
    for others in ([3], [70, [-1]], [[-1, 0, 0], 1, 1, 1, 600, [-1]]):
        lengths = [rng.randrange(600) for _ in others]
        batch = step_of([tree, *others], [530, *lengths], alone)
        assert torch.equal(cases.run(batch, form, options)[: len(tree)], expected)


@pytest.mark.parametrize("form", ["exact", "cpu"])
def test_the_order_of_nodes_changes_nothing(form: str) -> None:
    rng = random.Random(9)
    for trial in range(20):
        parents = [-1, *(rng.randrange(n) for n in range(1, 14))]
        step = random_step([parents], [rng.randrange(700)], seed=trial, page_size=4, **SHAPE)  # type: ignore[arg-type]
        expected = cases.run(step, form, {"scale": 0.25})
        other, order = cases.reordered(step, rng)
        actual = cases.run(other, form, {"scale": 0.25})
        assert torch.equal(actual, expected[order])


@pytest.mark.usefixtures("threads")
def test_threads_change_nothing() -> None:
    """One thread takes all parts of a row in turn; several take one each and merge."""
    trees = [cases.shallow_tree(random.Random(1), 9), 30]
    step = random_step([*trees, 1], [1700, 900, 2100], dtype=torch.bfloat16)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(cases.run(step, "cpu", {"scale": 0.125, "window": None}))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_chunks_of_a_prompt_change_nothing() -> None:
    """Compiled, a prompt's row is the same in one chunk, in several, and decoded on its own."""
    if not is_compiled():
        pytest.skip("no compiler: the torch form of the CPU is not exact")
    step = random_step([700], [0], shuffled=False, **SHAPE)  # type: ignore[arg-type]
    whole = cases.run(step, "cpu", {"scale": 0.25})
    table = step.batch.block_tables_host
    for start, rows in ((0, 100), (100, 1), (101, 499), (600, 100)):
        batch = TreeBatch.from_lists([rows], [start], table, 16)
        part = tree_attention(
            step.query[start : start + rows], step.key_cache, step.value_cache,
            plan_tree_attention(batch), scale=0.25,
        )  # fmt: skip
        assert torch.equal(part, whole[start : start + rows])


def test_branches_that_are_too_long_for_the_lanes_are_refused() -> None:
    branch = [-1, 0, 0, *range(2, 18)]
    assert plan_tree_attention(
        TreeBatch.from_lists([branch[:-1]], [3], [range(9)], 4), layout="exact"
    )
    batch = TreeBatch.from_lists([[-1], branch], [0, 3], [[0], range(9)], 4)
    with pytest.raises(
        ValueError, match="request 1 has a branch of 17 nodes off its principal path"
    ):
        plan_tree_attention(batch, layout="exact")
    assert plan_tree_attention(batch)
    with pytest.raises(ValueError, match='layout: must be "fast" or "exact"'):
        plan_tree_attention(batch, layout="slow")  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["exact", "cpu", "torch"])
def test_nothing_is_left_from_a_bigger_step(form: str) -> None:
    """The buffers of a form hold whatever the step before left in them: here NaN, everywhere."""
    step = random_step([cases.shallow_tree(random.Random(2), 7), 3], [40, 530], **SHAPE)  # type: ignore[arg-type]
    expected = cases.run(step, form, {"scale": 0.25})
    bigger = random_step(
        [cases.shallow_tree(random.Random(3), 16), 90], [1100, 700], num_heads=24, num_kv_heads=2,
        head_dim=64,
    )  # fmt: skip
    for tensor in (bigger.query, bigger.key_cache, bigger.value_cache):
        tensor.fill_(float("nan"))
    assert bool(cases.run(bigger, form, {"scale": 0.25}).isnan().all())
    assert torch.equal(cases.run(step, form, {"scale": 0.25}), expected)
