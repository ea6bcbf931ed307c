"""Tree attention in Triton's interpreter; `test_triton.py` runs this file in a process of its own.

The interpreter is chosen by an environment variable that Triton reads while it is imported, so
these cases cannot share a process with code that has imported it otherwise. Parts are shorter here
than on a GPU, so that small steps have several.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specdec_kernels import plan_tree_attention, tree_attention
from specdec_kernels.testing import (
    RandomStep,
    assert_matches_low_precision_reference,
    dense_attention,
    quantised_step,
    random_step,
    random_tree,
)
from specdec_kernels.tree_attention.base import Layout
from specdec_kernels.tree_attention.triton import (
    Variant,
    attention_configuration,
    configurations,
    lanes_of,
    padded_dim,
)
from specdec_kernels.tree_attention.triton_plan import TritonPlan
from tests.kernels import fault_cases as cases
from tests.kernels.exact_cases import shallow_tree

SPLIT = 64
LAYOUTS: list[Layout] = ["fast", "exact"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
QUANTISED = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch and results begin as NaN, so that whatever is read unwritten shows."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def trees(*sizes: int, seed: int = 0) -> list[list[int] | int]:
    rng = random.Random(seed)
    return [random_tree(rng, size) for size in sizes]


def check(
    step: RandomStep,
    layout: Layout = "fast",
    cache: torch.dtype | None = None,
    num_programs: int = 5,
    **options: Any,
) -> torch.Tensor:
    """The result, after a comparison with the dense oracle."""
    options.setdefault("scale", step.query.shape[2] ** -0.5)
    scales: dict[str, Any] = {}
    if cache is not None:
        step, scales["key_scales"], scales["value_scales"] = quantised_step(step, cache)
    plan = TritonPlan(step.batch, layout, num_programs=num_programs, split=SPLIT)
    actual = tree_attention(
        step.query, step.key_cache, step.value_cache, plan, **{**options, **scales}
    )
    high = dense_attention(step, **options)
    low = dense_attention(step, dtype=step.query.dtype, **options)
    assert_matches_low_precision_reference(actual, high, low, f"{layout} {cache}")
    return actual


def check_random_case(seed: int, most_committed: int, most_nodes: int) -> None:
    """Anything that a layer, a cache and a batch may be."""
    rng = random.Random(seed)
    layout = rng.choice(LAYOUTS)
    page_size = rng.choice([1, 8, 16, 64])
    heads, kv_heads = rng.choice([*cases.HEADS, *((g, 1) for g in range(1, 9))])
    parents: list[list[int] | int] = []
    lengths = []
    for _ in range(rng.randint(1, 3)):
        size = min(most_nodes, rng.choice([1, 3, 17, rng.randint(1, 256)]))
        tree = random_tree(rng, size) if layout == "fast" else shallow_tree(rng, size)
        kinds: list[list[int] | int] = [tree, tree, size, 0]
        parents.append(rng.choice(kinds))
        edge = rng.randrange(1, 4) * page_size + rng.choice([-1, 0, 1])
        lengths.append(rng.choice([0, edge, rng.randrange(SPLIT), rng.randrange(most_committed)]))
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["window"] = rng.choice([1, 9, 70, 200])
    if rng.random() < 0.3:
        options["softcap"] = 3.0
    if rng.random() < 0.3:
        options["sinks"] = torch.randn(heads, generator=torch.Generator().manual_seed(seed))
    step = random_step(
        parents, lengths, num_heads=heads, num_kv_heads=kv_heads, page_size=page_size, seed=seed,
        head_dim=rng.choice([8, 16, 16, 24, 40, *cases.HEAD_DIMS]), dtype=rng.choice(DTYPES),
    )  # fmt: skip
    cache = rng.choice([None, None, *QUANTISED])
    check(step, layout, cache, num_programs=rng.choice([1, 3, 40]), **options)


@pytest.mark.parametrize("seed", range(7))
def test_random_cases(seed: int) -> None:
    check_random_case(seed, most_committed=300, most_nodes=40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_random_cases(seed: int) -> None:
    check_random_case(seed, most_committed=1500 if seed % 10 else 5000, most_nodes=256)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", QUANTISED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised_caches(dtype: torch.dtype, cache: torch.dtype, layout: Layout) -> None:
    """Values span twelve powers of two from token to token, as first tokens of prompts do."""
    step = random_step([[-1, 0, 0], 20], [70, 9], num_heads=4, num_kv_heads=2, head_dim=16,
                       dtype=dtype)  # fmt: skip
    for request, values in enumerate(step.values):
        sizes = torch.exp2(-torch.arange(len(values)) % 13).to(dtype)
        values.mul_(sizes[:, None, None])
        table = step.batch.block_tables_host[request]
        for slot, value in enumerate(values):
            step.value_cache[table[slot // 16], slot % 16] = value
    check(step, layout, cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinks_softcap_and_a_window_together(layout: Layout) -> None:
    """With a window the first tiles hold nothing that a row sees but the sink."""
    parents = [[-1], *trees(9), 0, 21, 1]
    step = random_step(parents, [75, 17, 3, 0, 0], num_heads=6, num_kv_heads=2, head_dim=16)
    sinks = torch.tensor([0.5, -30.0, float("-inf"), 2.0, 20.0, -1.0])
    check(step, layout, softcap=3.0, sinks=sinks)
    check(step, layout, sinks=sinks.double(), window=4)


@pytest.mark.parametrize("heads", cases.HEADS[::3], ids=str)
def test_head_groups(heads: tuple[int, int]) -> None:
    """N1: any number of query heads per KV head, KV head counts that are no power of two."""
    cases.check_head_group(heads, 5, [17], torch.float32, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["triton", "triton-exact"])
@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
def test_every_head_group(heads: tuple[int, int], rows: int, dtype: torch.dtype, form: str) -> None:
    cases.check_head_group(heads, rows, cases.CONTEXTS, dtype, form)


@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
def test_head_dims(head_dim: int) -> None:
    """N3: every element of a head counts, none is made up."""
    step = random_step([[-1, 0, 0], 5], [40, 3], num_heads=2, num_kv_heads=1, head_dim=head_dim,
                       dtype=torch.float16)  # fmt: skip
    check(step, LAYOUTS[head_dim % 64 > 0])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["triton", "triton-exact"])
@pytest.mark.parametrize("dtype", list(cases.TOLERANCES), ids=str)
@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
def test_every_head_dim(head_dim: int, dtype: torch.dtype, form: str) -> None:
    cases.check_head_dim(head_dim, 150, dtype, form)


@pytest.mark.parametrize("page_size", [1, 8, 128])
def test_page_sizes(page_size: int) -> None:
    step = random_step(trees(3, 12), [150, 15], num_heads=2, num_kv_heads=1, head_dim=16,
                       page_size=page_size)  # fmt: skip
    check(step, window=20)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_that_begin_at_any_place_of_a_tile(layout: Layout) -> None:
    lengths = list(range(28, 72, 3))
    parents: list[list[int] | int] = [[-1] for _ in lengths]
    step = random_step(parents, lengths, num_heads=1, num_kv_heads=1, head_dim=16)
    check(step, layout, window=5)


@pytest.mark.parametrize("num_nodes", [33, 65, 256])
def test_trees_of_several_words(num_nodes: int) -> None:
    check(random_step(trees(num_nodes, seed=num_nodes), [5], num_heads=1, num_kv_heads=1,
                      head_dim=16))  # fmt: skip


def test_padded_nodes_and_empty_requests() -> None:
    cases.check_padded_nodes("triton")


def test_rows_that_see_themselves_only() -> None:
    cases.check_rows_that_see_themselves_only("triton")


@pytest.mark.parametrize("form", ["triton", "triton-exact"])
def test_scores_below_any_floor(form: str) -> None:
    cases.check_scores_below_any_floor(form)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_arguments(layout: Layout) -> None:
    step = random_step([[-1, 0, 1, 0]], [30], num_heads=4, num_kv_heads=2, head_dim=16)
    plan = TritonPlan(step.batch, layout, split=SPLIT)
    query = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    stacked = torch.stack([step.key_cache, step.value_cache], dim=2)
    actual = tree_attention(query, stacked[:, :, 0], stacked[:, :, 1], plan, scale=0.25)
    assert torch.equal(actual, check(step, layout, scale=0.25))


def test_a_step_without_rows() -> None:
    empty = random_step([0], [5], head_dim=16)
    for layout in LAYOUTS:
        plan = plan_tree_attention(empty.batch, impl="triton", layout=layout)
        arguments = (empty.query, empty.key_cache, empty.value_cache, plan)
        assert tree_attention(*arguments, scale=1.0).shape == (0, 9, 16)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"dtype": torch.float64, "head_dim": 16}, 'the "triton" form computes fp16, bf16 and'),
        ({"head_dim": 12}, "head dimensions that are multiples of 8 up to 256, got 12"),
        ({"head_dim": 264}, "head dimensions that are multiples of 8 up to 256, got 264"),
    ],
)
def test_refused_queries(shape: dict[str, Any], message: str) -> None:
    step = random_step([1], [5], **shape)
    plan = plan_tree_attention(step.batch, impl="triton")
    with pytest.raises(ValueError, match=f"query: .*{message}"):
        tree_attention(step.query, step.key_cache, step.value_cache, plan, scale=1.0)


def test_heads_of_a_cache_must_be_contiguous() -> None:
    step = random_step([1], [5], head_dim=16)
    plan = plan_tree_attention(step.batch, impl="triton")
    keys = step.key_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="key_cache and value_cache: the head dimension must be"):
        tree_attention(step.query, keys, step.value_cache, plan, scale=1.0)


@pytest.mark.parametrize("groups", [1, 3, 7, 16, 17, 40, 64, 100])
def test_every_block_holds_at_least_one_row(groups: int) -> None:
    assert 1 <= lanes_of(groups) // groups * groups <= lanes_of(groups)


def test_shipped_configurations() -> None:
    """Names are unique, and what is shipped is what a launch asks for."""
    shipped = {configuration.name: configuration for configuration in configurations()}
    assert len(shipped) == len(configurations())
    asked = attention_configuration(Variant(torch.float16, torch.float16, 128, exact=False))
    assert shipped["tree_attention/attention/fast-fp16-fp16-128"] == asked
    for configuration in shipped.values():
        arguments = configuration.signature.keys() | configuration.constants.keys()
        assert arguments == set(configuration.kernel.arg_names)
    assert [padded_dim(d) for d in (8, 16, 72, 256)] == [16, 16, 128, 256]
