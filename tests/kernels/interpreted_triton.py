"""Cases for Triton's interpreter; `test_triton.py` runs this file in a process of its own.

The interpreter is chosen by an environment variable that Triton reads while it is imported, so
these cases cannot share a process with code that has imported it otherwise.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specdec_kernels import plan_tree_attention, tree_attention, write_kv
from specdec_kernels.testing import (
    RandomStep,
    assert_matches_low_precision_reference,
    dense_attention,
    random_step,
    random_tree,
)
from specdec_kernels.tree_attention.triton import TritonPlan, block_sizes
from specdec_kernels.write_kv.triton import triton_write_kv
from tests.kernels import fault_cases as cases


def trees(*sizes: int, seed: int = 0) -> list[list[int] | int]:
    rng = random.Random(seed)
    return [random_tree(rng, size) for size in sizes]


def check(step: RandomStep, **options: Any) -> torch.Tensor:
    options.setdefault("scale", step.query.shape[2] ** -0.5)
    plan = plan_tree_attention(step.batch, impl="triton")
    actual = tree_attention(step.query, step.key_cache, step.value_cache, plan, **options)
    high = dense_attention(step, **options)
    low = dense_attention(step, dtype=step.query.dtype, **options)
    assert_matches_low_precision_reference(actual, high, low, "triton")
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 9, 70])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_ragged_batches(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    parents = [*trees(1, 9), 0, 21, *trees(30), 1]
    step = random_step(
        parents, [65, 17, 3, 0, 16, 0], num_heads=6, num_kv_heads=2, head_dim=16, dtype=dtype
    )
    check(step, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_sinks(softcap: float | None, dtype: torch.dtype) -> None:
    """With a window the first tiles hold nothing that a row sees but the sink."""
    parents = [*trees(1, 9), 0, 21, 1]
    step = random_step(
        parents, [75, 17, 3, 0, 0], num_heads=6, num_kv_heads=2, head_dim=16, dtype=dtype
    )
    sinks = torch.tensor([0.5, -30.0, float("-inf"), 2.0, 20.0, -1.0])
    check(step, softcap=softcap, sinks=sinks.to(dtype))
    check(step, softcap=softcap, sinks=sinks.double(), window=4)


@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
def test_head_groups(heads: tuple[int, int]) -> None:
    """N1: any number of query heads per KV head, KV head counts that are no power of two."""
    cases.check_head_group(heads, 5, [17, 1], torch.float32, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
def test_every_head_group(heads: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    cases.check_head_group(heads, rows, cases.CONTEXTS, dtype, "triton")


@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
def test_head_dims(head_dim: int) -> None:
    """N3: every element of a head counts, none is made up."""
    cases.check_head_dim(head_dim, 20, torch.float16, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
def test_every_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    cases.check_head_dim(head_dim, 150, dtype, "triton")


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 128])
def test_page_sizes(page_size: int) -> None:
    step = random_step(trees(3, 12), [150, 15], num_heads=2, num_kv_heads=1, head_dim=16,
                       page_size=page_size)  # fmt: skip
    check(step)
    check(step, window=20)


def test_windows_that_begin_at_any_place_of_a_tile() -> None:
    lengths = list(range(28, 72))
    parents: list[list[int] | int] = [[-1] for _ in lengths]
    step = random_step(parents, lengths, num_heads=1, num_kv_heads=1, head_dim=16)
    check(step, window=5)


def test_programs_may_run_in_any_order() -> None:
    """Spare lanes of a program (64 are not a multiple of 3 heads) must not write other rows."""
    step = random_step(trees(60), [10], num_heads=3, num_kv_heads=1, head_dim=16)
    plan = plan_tree_attention(step.batch, impl="triton")
    assert isinstance(plan, TritonPlan)
    rows = block_sizes(3, 16, 60, step.query.element_size())[0]
    requests, firsts = plan._blocks_of(rows)
    assert len(firsts) > 1
    plan._blocks[rows] = (requests.flip(0), firsts.flip(0))
    arguments = (step.query, step.key_cache, step.value_cache, plan)
    torch.testing.assert_close(tree_attention(*arguments, scale=0.25), check(step, scale=0.25))


@pytest.mark.parametrize("num_nodes", [63, 64, 65, 129, 256])
def test_trees_of_several_words(num_nodes: int) -> None:
    parents = [*trees(num_nodes, seed=num_nodes), 140]
    check(random_step(parents, [5, 3], num_heads=1, num_kv_heads=1, head_dim=16))


def test_padded_nodes_and_empty_requests() -> None:
    cases.check_padded_nodes("triton")


def test_rows_that_see_themselves_only() -> None:
    cases.check_rows_that_see_themselves_only("triton")


def test_scores_below_any_floor() -> None:
    cases.check_scores_below_any_floor("triton")


def test_strided_arguments() -> None:
    step = random_step(trees(9), [30], num_heads=4, num_kv_heads=2, head_dim=16)
    plan = plan_tree_attention(step.batch, impl="triton")
    query = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    stacked = torch.stack([step.key_cache, step.value_cache], dim=2)
    actual = tree_attention(query, stacked[:, :, 0], stacked[:, :, 1], plan, scale=0.25)
    torch.testing.assert_close(actual, check(step, scale=0.25))


def test_a_step_without_rows_and_refused_arguments() -> None:
    empty = random_step([0], [5], head_dim=16)
    plan = plan_tree_attention(empty.batch, impl="triton")
    shape = tree_attention(empty.query, empty.key_cache, empty.value_cache, plan, scale=1.0).shape
    assert shape == (0, 9, 16)
    double = random_step([1], [5], head_dim=16, dtype=torch.float64)
    plan = plan_tree_attention(double.batch, impl="triton")
    with pytest.raises(ValueError, match='the "triton" form computes fp16, bf16 and fp32'):
        tree_attention(double.query, double.key_cache, double.value_cache, plan, scale=1.0)


@pytest.mark.parametrize("groups", [1, 3, 7, 16, 17, 40, 64, 100])
def test_every_program_holds_at_least_one_row(groups: int) -> None:
    for most_rows in (1, 5, 64, 256):
        for head_dim in (16, 128, 256):
            rows, block_m, block_n = block_sizes(groups, head_dim, most_rows, 4)
            assert rows >= 1
            assert rows * groups <= block_m
            assert 16 <= block_n <= 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (1, 72), (5, 80)])
def test_write_kv(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    wide = torch.randn(6, 2, heads, head_dim).to(dtype)
    caches = torch.randn(2, 5, 4, heads, head_dim).to(dtype)
    expected = caches.clone()
    slots = torch.tensor([19, 0, 7, 4, 12, 1])
    triton_write_kv(wide[:, 0], wide[:, 1], caches[0], caches[1], slots)
    write_kv(wide[:, 0], wide[:, 1], expected[0], expected[1], slots)
    assert torch.equal(caches, expected)
