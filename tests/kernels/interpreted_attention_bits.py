"""Bits of Triton's tree attention that nothing but the row itself may change; see `test_triton.py`.

Parts are shorter here than on a GPU, so that small steps have several.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import TreeBatch, tree_attention
from specdec_kernels.testing import RandomStep, quantised_step, random_step, random_tree
from specdec_kernels.tree_attention import triton_lists, triton_plan
from specdec_kernels.tree_attention.base import Layout
from specdec_kernels.tree_attention.cascade import SharedPrefix, shared_prefixes
from specdec_kernels.tree_attention.triton_lists import Capacity
from specdec_kernels.tree_attention.triton_plan import TritonPlan
from tests.kernels import exact_cases as cases

SPLIT = 32
MANY = 20
"""Programs, so many that all blocks of these steps are split."""
LAYOUTS: list[Layout] = ["fast", "exact"]
SHAPE: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
MIXED: list[list[int] | int] = [[-1, 0, 1, 0], 40, 0, [-1]]
LENGTHS = [100, 30, 9, 70]


def attend(step: RandomStep, plan: TritonPlan, **options: Any) -> Tensor:
    options.setdefault("scale", 0.25)
    return tree_attention(step.query, step.key_cache, step.value_cache, plan, **options)


def make(batch: TreeBatch, layout: Layout, **options: Any) -> TritonPlan:
    options.setdefault("split", SPLIT)
    return TritonPlan(batch, layout, **options)


def places(plan: TritonPlan) -> list[int]:
    """Where the blocks of the plan's one work list leave their parts; -1: nowhere."""
    (work,) = plan._works.values()
    return work.places[: int(work.blocks.num_blocks)].tolist()


FEATURES: dict[str, Any] = {"window": 50, "sinks": torch.tensor([0.5, -2.0]), "softcap": 4.0}


@pytest.mark.parametrize(
    "options", [FEATURES, pytest.param({}, marks=pytest.mark.slow)], ids=["features", "plain"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_the_work_is_cut_changes_nothing(
    layout: Layout, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks whole, all split, and some: scratch that is too small for the rest."""
    dtype = torch.bfloat16 if (layout == "fast") == bool(options) else torch.float32
    step = random_step(MIXED, LENGTHS, dtype=dtype, **SHAPE)
    whole = make(step.batch, layout, num_programs=1)
    expected = attend(step, whole, **options)
    assert set(places(whole)) == {-1}
    split = make(step.batch, layout, num_programs=MANY)
    assert torch.equal(attend(step, split, **options), expected)
    assert min(places(split)) >= 0
    monkeypatch.setattr(triton_lists, "MAX_PLACES", 6)
    some = make(step.batch, layout, num_programs=MANY)
    assert torch.equal(attend(step, some, **options), expected)
    assert min(places(some)) == -1 < max(places(some))


@pytest.mark.parametrize("num_programs", [pytest.param(1, marks=pytest.mark.slow), MANY])
def test_items_may_run_in_any_order(num_programs: int) -> None:
    """Spare lanes of a block (64 are no multiple of 3 heads) must not write other rows."""
    step = random_step([random_tree(random.Random(1), 50), [-1]], [70, 9], num_heads=3,
                       num_kv_heads=1, head_dim=16)  # fmt: skip
    plan = make(step.batch, "fast", num_programs=num_programs)
    expected = attend(step, plan)
    (work,) = plan._works.values()
    count = int(work.num_items)
    assert count > 3
    work.items[:count] = work.items[:count].flip(0)
    assert torch.equal(attend(step, plan), expected)


def with_contents(step: RandomStep, part: RandomStep) -> RandomStep:
    """`step`, its first request replaced by that of `part`."""
    rows = part.batch.cu_nodes_host[1]
    step.query[:rows] = part.query[:rows]
    pages, old = (torch.tensor(s.batch.block_tables_host[0]) for s in (step, part))
    step.key_cache[pages] = part.key_cache[old]
    step.value_cache[pages] = part.value_cache[old]
    return step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_requests_change_nothing(layout: Layout) -> None:
    tree = cases.shallow_tree(random.Random(4), 9)
    alone = random_step([tree], [75], **SHAPE)
    expected = attend(alone, make(alone.batch, layout))
    others: list[list[list[int] | int]] = [[3], [70, [-1]], [[-1, 0, 0], 1, 1, 1]]
    for number, more in enumerate(others):
        lengths = [75, *(37 * number + n for n in range(len(more)))]
        step = random_step([tree, *more], lengths, seed=9, **SHAPE)
        step = with_contents(step, alone)
        actual = attend(step, make(step.batch, layout))
        assert torch.equal(actual[: len(tree)], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_nodes_change_nothing(layout: Layout) -> None:
    """Contents of nodes that are no ancestors, and the number of nodes that follow."""
    tree = [-1, 0, 0, 2, 1, 3]
    step = random_step([tree], [70], **SHAPE)
    expected = attend(step, make(step.batch, layout))
    slots = step.batch.slots
    for node, ancestors in ((3, [0, 2, 3]), (4, [0, 1, 4])):
        query, keys, values = (t.clone() for t in (step.query, step.key_cache, step.value_cache))
        others = [n for n in range(len(tree)) if n not in ancestors]
        for tensor in (keys.flatten(0, 1), values.flatten(0, 1)):
            tensor[slots[others]] = 1e4
        query[others] = -3.0
        plan = make(step.batch, layout)
        actual = tree_attention(query, keys, values, plan, scale=0.25)
        assert torch.equal(actual[node], expected[node])
    longer = random_step([[*tree, *range(2, 60)]], [70], seed=3, **SHAPE)
    if layout == "exact":
        longer = random_step([[*tree, *[0] * 58]], [70], seed=3, **SHAPE)
    pages = torch.tensor(longer.batch.block_tables_host[0])
    old = torch.tensor(step.batch.block_tables_host[0])
    longer.query[: len(tree)] = step.query
    finite = ~torch.isnan(step.key_cache[old])
    for new, source in (
        (longer.key_cache, step.key_cache), (longer.value_cache, step.value_cache),
    ):  # fmt: skip
        new[pages[: len(old)]] = torch.where(finite, source[old], new[pages[: len(old)]])
    actual = attend(longer, make(longer.batch, layout))
    assert torch.equal(actual[: len(tree)], expected)


def test_the_order_of_nodes_changes_nothing_in_the_exact_layout() -> None:
    rng = random.Random(9)
    for trial in range(2):
        parents = [-1, *(rng.randrange(n) for n in range(1, 14))]
        step = random_step([parents], [rng.randrange(150)], seed=trial, **SHAPE)
        expected = attend(step, make(step.batch, "exact"))
        other, order = cases.reordered(step, rng)
        actual = attend(other, make(other.batch, "exact"))
        assert torch.equal(actual, expected[order])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_chunks_of_a_prompt_change_nothing(layout: Layout) -> None:
    step = random_step([90], [0], shuffled=False, **SHAPE)
    whole = attend(step, make(step.batch, layout))
    for start, rows in ((0, 20), (20, 1), (21, 49), (70, 20)):
        batch = TreeBatch.from_lists([rows], [start], step.batch.block_tables_host, 16)
        query = step.query[start : start + rows]
        plan = make(batch, layout)
        part = tree_attention(query, step.key_cache, step.value_cache, plan, scale=0.25)
        assert torch.equal(part, whole[start : start + rows])


def decoded_alone(step: RandomStep, kinds: Sequence[bool]) -> tuple[TreeBatch, Tensor, Tensor]:
    """Every node of the one tree as a request of its own whose ancestors were committed.

    kinds: whether the row is a chain or a tree of one node.
    """
    steps = [cases.alone_step(step, node, as_chain=kind) for node, kind in enumerate(kinds)]
    tables, used = [], 0
    for alone in steps:
        tables.append([used + page for page in alone.batch.block_tables_host[0]])
        used += alone.key_cache.shape[0]
    batch = TreeBatch.from_lists(
        [alone.parents[0] for alone in steps],
        [alone.batch.committed_lens_host[0] for alone in steps], tables, cases.PAGE_SIZE,
    )  # fmt: skip
    keys, values = ([getattr(a, name) for a in steps] for name in ("key_cache", "value_cache"))
    return batch, torch.cat(keys), torch.cat(values)


def count_differing(layout: Layout, num_rows: int, seed: int) -> tuple[int, int]:
    """(rows of random trees that differ from the row decoded alone, rows)."""
    rng = random.Random(seed)
    differing = rows = 0
    while rows < num_rows:
        tree = cases.shallow_tree(rng, rng.choice([2, 9, 24]))
        dtype = rng.choice([torch.float32, torch.bfloat16])
        step = random_step([tree], [rng.randrange(150)], seed=rows, dtype=dtype, **SHAPE)
        options: dict[str, Any] = {"scale": 0.25}
        if rng.random() < 0.3:
            options["window"] = rng.choice([1, 9, 16, 17, 80])
        together = attend(step, make(step.batch, layout, split=64), **options)
        kinds = [rng.random() < 0.5 for _ in tree]
        batch, keys, values = decoded_alone(step, kinds)
        plan = make(batch, layout, split=64, num_programs=rng.choice([1, MANY]))
        alone = tree_attention(step.query, keys, values, plan, **options)
        differing += int((together != alone).flatten(1).any(1).sum())
        rows += len(tree)
    return differing, rows


def test_a_row_in_a_tree_is_the_row_decoded_alone(capsys: pytest.CaptureFixture[str]) -> None:
    differing, rows = count_differing("exact", 15, seed=1)
    fast, fast_rows = count_differing("fast", 5, seed=1)
    with capsys.disabled():
        print(f"\nexact: {differing} of {rows} rows differ, fast: {fast} of {fast_rows}")
    assert differing == 0
    assert fast > 0, "the comparison cannot tell the layouts apart"


@pytest.mark.slow
def test_no_row_of_many_differs() -> None:
    differing, rows = count_differing("exact", 2000, seed=2)
    assert rows >= 2000
    assert differing == 0
    for seed in range(3):
        shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 72, "most_committed": 700}
        assert cases.differing_rows("triton-exact", 30, seed, **shape)[0] == 0


def sharing_step(rng: random.Random, parents: list[list[int] | int]) -> RandomStep:
    """Requests 0, 1, 3 and 4 share two parts and request 0 and 3 three; 2 shares nothing."""
    lengths = [107, 70, 38, 99, 65]
    counts = [parent if isinstance(parent, int) else len(parent) for parent in parents]
    tables: list[list[int]] = []
    page = 0
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table = [] if request in (0, 2) else tables[0][: 6 if request == 3 else 4]
        while len(table) * 16 < length + count:
            table.append(page)
            page += 1
        tables.append(table)
    batch = TreeBatch.from_lists(parents, lengths, tables, 16)
    generator = torch.Generator().manual_seed(rng.randrange(99))
    caches = torch.randn(2, page, 16, 1, 16, generator=generator)
    query = torch.randn(batch.num_rows, 2, 16, generator=generator)
    return RandomStep(batch, parents, query, caches[0], caches[1], [], [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_pages_are_read_once_with_the_same_bits(layout: Layout) -> None:
    parents: list[list[int] | int] = [[-1, 0, 1, 0], 5, [-1], 30, [-1, 0]]
    step = sharing_step(random.Random(2), parents)
    for options in ({}, {"window": 60, "sinks": torch.tensor([1.0, -1.0])})[layout == "exact" :]:
        apart = make(step.batch, layout, cascade=False)
        expected = attend(step, apart, **options)
        assert int(next(iter(apart._blocks.values())).num_shared) == 0
        plan = make(step.batch, layout)
        assert torch.equal(attend(step, plan, **options), expected)
        (blocks,) = plan._blocks.values()
        assert int(blocks.num_shared) == 2  # 41 rows of two heads.
        assert (blocks.shared_blocks >= 0).tolist() == [True] * 9 + [False] + [True] * 32


def test_what_is_shared_and_who_shares_it() -> None:
    step = sharing_step(random.Random(0), [1, 1, 1, 1, 1])
    assert shared_prefixes(step.batch, 32) == [SharedPrefix([0, 1, 3, 4], 2)]
    assert shared_prefixes(step.batch, 64) == [SharedPrefix([0, 1, 3, 4], 1)]
    assert shared_prefixes(step.batch, 128) == []
    # Three parts of two requests save more than one part of three.
    tables = [[0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6, 7], [8, 9, 2, 3]]
    batch = TreeBatch.from_lists([1, 1, 1, 1], [12] * 4, tables, 4)
    assert shared_prefixes(batch, 4) == [SharedPrefix([0, 1], 3)]
    # A request without rows reads nothing, and slots that are not committed are not shared.
    batch = TreeBatch.from_lists([1, 0, 1], [8, 8, 7], [[0, 1, 2], [0, 1], [0, 1]], 4)
    assert shared_prefixes(batch, 4) == [SharedPrefix([0, 2], 1)]


def test_groups_that_do_not_fit_scratch_are_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_lists, "MAX_PLACES", 5)
    step = sharing_step(random.Random(2), [1, 1, 1, 1, 1])
    plan = make(step.batch, "fast")
    expected = attend(step, make(step.batch, "fast", cascade=False))
    assert torch.equal(attend(step, plan), expected)
    assert int(next(iter(plan._blocks.values())).num_shared) == 0


def as_recorded(value: Any) -> Any:
    return (value.data_ptr(), value.shape, value.stride()) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("layout", ["fast", pytest.param("exact", marks=pytest.mark.slow)])
def test_one_captured_graph_serves_any_batch(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph would have recorded is the same for all batches; results are those of new plans.

    Results themselves are left out: a graph keeps their memory, the caching allocator does here.
    """
    launches: list[Any] = []

    def recorded(configuration: Any, grid: Any, arguments: Sequence[Any]) -> None:
        launches.append((configuration, grid, [as_recorded(a) for a in arguments]))
        triton_lists.launch(configuration, grid, arguments)

    monkeypatch.setattr(triton_plan, "launch", recorded)
    rng = random.Random(1)
    batches: list[tuple[list[list[int] | int], list[int]]] = [
        (MIXED, LENGTHS), ([1], [0]), ([[-1], 9, 2], [160, 0, 64]), ([], []),
        ([random_tree(rng, 60) if layout == "fast" else cases.shallow_tree(rng, 20), 3], [9, 65]),
    ]  # fmt: skip
    caches = torch.empty(2, 64, 16, 1, 16)
    query = torch.empty(70, 2, 16)
    capacity = Capacity(requests=5, rows=70, pages=30, places=9)
    plan: TritonPlan | None = None
    first: list[Any] = []
    for number, (parents, lengths) in enumerate([*batches, *batches[:1]]):
        step = random_step(parents, lengths, seed=number, **SHAPE)
        pages = step.key_cache.shape[0]
        caches[0, :pages], caches[1, :pages] = step.key_cache, step.value_cache
        query[: len(step.query)] = step.query
        if plan is None:
            plan = make(step.batch, layout, capacity=capacity, num_programs=7)
        else:
            plan.update(step.batch)
        launches.clear()
        results = [
            tree_attention(query, caches[0], caches[1], plan, scale=0.25, window=window)
            for window in (None, 40)
        ]
        calls = [(c, grid, [a for n, a in enumerate(args) if c.kernel.arg_names[n] != "out_ptr"])
                 for c, grid, args in launches]  # fmt: skip
        first = first or calls
        assert calls == first
        for window, result in zip((None, 40), results, strict=True):
            fresh = make(step.batch, layout)
            expected = attend(step, fresh, window=window)
            assert torch.equal(result[: len(step.query)], expected)


def test_a_graph_serves_batches_with_and_without_shared_pages() -> None:
    step = sharing_step(random.Random(2), [1, 1, 1, 1, 1])
    plan = make(step.batch, "fast", capacity=Capacity(5, 5, 10))
    expected = attend(step, make(step.batch, "fast", cascade=False))
    assert torch.equal(attend(step, plan), expected)
    tables = step.batch.block_tables_host
    other = TreeBatch.from_lists([1, 1, 1], [60, 70, 38], tables[:3], 16)
    plan.update(other)
    wanted = make(other, "fast", cascade=False)
    actual = attend(step, plan)[:3]
    caches = (step.key_cache, step.value_cache)
    assert torch.equal(actual, tree_attention(step.query[:3], *caches, wanted, scale=0.25))
    plan.update(step.batch)
    assert torch.equal(attend(step, plan), expected)


def test_batches_that_a_plan_cannot_take() -> None:
    step = random_step([1], [20], **SHAPE)
    with pytest.raises(ValueError, match="batch: only a plan with a capacity can be updated"):
        make(step.batch, "fast").update(step.batch)
    with pytest.raises(ValueError, match=r"batch: 1 requests, 1 rows and 2 pages .* do not fit"):
        make(step.batch, "fast", capacity=Capacity(1, 1, 1))
    plan = make(step.batch, "exact", capacity=Capacity(2, 40, 20))
    with pytest.raises(ValueError, match="batch: page size 4 on cpu, the plan was made for 16"):
        plan.update(random_step([1], [20], page_size=4, **SHAPE).batch)
    with pytest.raises(ValueError, match="request 0 has a branch of 17 nodes off its"):
        plan.update(random_step([[-1, 0, 0, *range(2, 18)]], [20], **SHAPE).batch)


@pytest.mark.parametrize(
    "cache", [torch.float8_e4m3fn, pytest.param(torch.int8, marks=pytest.mark.slow)], ids=str
)
def test_quantised_rows_are_exact_too(cache: torch.dtype) -> None:
    tree = cases.shallow_tree(random.Random(8), 12)
    step = random_step([tree], [90], dtype=torch.bfloat16, **SHAPE)
    options = {"scale": 0.25}
    small, key_scales, value_scales = quantised_step(step, cache)
    plan = make(small.batch, "exact")
    together = attend(small, plan, key_scales=key_scales, value_scales=value_scales)
    batch, keys, values = decoded_alone(step, [True, False] * 6)
    alone = RandomStep(batch, [], step.query, keys, values, [], [])
    alone, key_scales, value_scales = quantised_step(alone, cache)
    plan = make(batch, "exact", num_programs=1)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    assert torch.equal(attend(alone, plan, **options, **scales), together)
