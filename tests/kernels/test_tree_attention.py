"""Tree attention on the CPU against a dense oracle in fp64 that shares no code with it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specdec_kernels import TreeBatch, tree_attention
from specdec_kernels.testing import (
    RandomStep,
    assert_matches_low_precision_reference,
    dense_attention,
    random_step,
    random_tree,
)
from specdec_kernels.tree_attention import cpu_torch
from specdec_kernels.tree_attention.reference import reference_tree_attention
from tests.kernels.forms import CPU_FORMS, TorchPlan, can_run, make_plan

LOW = [torch.float16, torch.bfloat16]


def trees(*sizes: int, seed: int = 0) -> list[list[int] | int]:
    rng = random.Random(seed)
    return [random_tree(rng, size) for size in sizes]


def attend(step: RandomStep, form: str, **options: Any) -> torch.Tensor:
    options.setdefault("scale", step.query.shape[2] ** -0.5)
    plan = make_plan(step.batch, form)
    first = tree_attention(step.query, step.key_cache, step.value_cache, plan, **options)
    again = tree_attention(step.query, step.key_cache, step.value_cache, plan, **options)
    assert torch.equal(first, again), "a plan must serve every layer alike"
    return first


def check(step: RandomStep, **options: Any) -> None:
    """Every form against the oracle, with the budget of an independent low-precision evaluation."""
    options.setdefault("scale", step.query.shape[2] ** -0.5)
    high = dense_attention(step, **options)
    low = dense_attention(step, dtype=step.query.dtype, **options)
    for form in CPU_FORMS:
        if not can_run(step.batch, form) or (form == "exact" and step.batch.num_rows > 500):
            continue  # the exact layout in torch is slow, and knows no other code for many rows
        actual = attend(step, form, **options)
        if actual.dtype == torch.float64:
            torch.testing.assert_close(actual, high, atol=1e-13, rtol=1e-13)
        else:
            assert_matches_low_precision_reference(actual, high, low, form)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 128])
@pytest.mark.parametrize("shuffled", [True, False])
def test_page_sizes_and_empty_prefixes(page_size: int, shuffled: bool) -> None:
    parents = [*trees(1, 2, 16, 33, 64), 5, 0, 40, 1, *trees(8)]
    lengths = [0, 1, 15, 16, 17, 0, 12, 100, 0, 0]
    step = random_step(parents, lengths, head_dim=16, page_size=page_size, shuffled=shuffled)
    check(step)
    check(step, window=9)


@pytest.mark.parametrize("num_nodes", [31, 32, 33, 64, 65, 128, 129, 193, 256])
def test_tree_sizes_around_words_and_forms(num_nodes: int) -> None:
    step = random_step(trees(num_nodes, seed=num_nodes), [21], head_dim=16)
    check(step)
    check(step, window=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW], ids=str)
@pytest.mark.parametrize("window", [1, 2, 7, 16, 33, 64, 10_000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_windows_and_softcap(window: int, softcap: float | None, dtype: torch.dtype) -> None:
    """A window counts logical positions, so siblings and deep nodes see different tokens."""
    parents = [*trees(1, 9, 50), 6, 45]
    step = random_step(parents, [40, 8, 61, 30, 0], head_dim=16, dtype=dtype, seed=window)
    check(step, window=window, softcap=softcap, scale=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW], ids=str)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_sinks(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    """Sinks below, among and far above the scores, and none at all (minus infinity)."""
    parents = [*trees(1, 9, 50), 6, 45, 0]
    step = random_step(parents, [40, 8, 61, 30, 0, 5], head_dim=16, dtype=dtype)
    sinks = torch.tensor([0.5, -30.0, float("-inf"), 2.0, 20.0, -1.0, 0.0, 5.0, -2.0])
    check(step, window=window, softcap=softcap, sinks=sinks.to(dtype))
    check(step, window=window, softcap=softcap, sinks=sinks.double(), scale=0.5)


@pytest.mark.parametrize("form", CPU_FORMS)
@pytest.mark.parametrize("window", [None, 4])
def test_sinks_are_those_of_gpt_oss(window: int | None, form: str) -> None:
    """Against the attention function of transformers for that model, on a prompt."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    step = random_step([21], [0], num_heads=8, num_kv_heads=2, head_dim=16)
    layer = torch.nn.Module()
    layer.sinks = torch.nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(1)))
    layer.num_key_value_groups = 4
    query, keys, values = (
        t.transpose(0, 1)[None] for t in (step.query, step.keys[0], step.values[0])
    )
    far = torch.arange(21)[:, None] - torch.arange(21)
    hidden = (far < 0) | (far >= (window or 21))
    mask = torch.zeros(21, 21).masked_fill(hidden, float("-inf"))
    with torch.no_grad():
        expected, _ = eager_attention_forward(
            layer.eval(), query, keys, values, mask, scaling=0.25, dropout=0.0
        )
    actual = attend(step, form, scale=0.25, window=window, sinks=layer.sinks)
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sinks": torch.linspace(-2, 2, 9)}])
@pytest.mark.parametrize("window", [None, 64])
def test_prompts_outside_fused_attention_are_bounded_in_memory(
    window: int | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer contexts get smaller blocks, down to single rows."""
    step = random_step([70, 3], [200, 0], head_dim=16)
    plain = attend(step, "torch", window=window, **options)
    for limit, num_blocks in ((1 << 14, 6), (1, 73)):
        monkeypatch.setattr(cpu_torch, "_MAX_SCORES", limit)
        plan = TorchPlan(step.batch, "fast")
        actual = tree_attention(
            step.query, step.key_cache, step.value_cache, plan, scale=0.25, window=window, **options
        )
        torch.testing.assert_close(actual, plain, atol=1e-6, rtol=1e-5)
        assert isinstance(plan, TorchPlan)
        (work,) = plan._workspaces.values()
        scores = [bound.scores for loaded in work.requests for bound in loaded.parts]
        assert len(scores) >= num_blocks
        assert max(s.numel() for s in scores) <= max(limit, 9 * 271)


def test_keys_of_a_prompt_are_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a chain share what was gathered; sinks and softcaps make many blocks."""
    step = random_step([600], [50], num_heads=3, head_dim=16, page_size=2)
    fetched = []
    load = cpu_torch._load
    monkeypatch.setattr(cpu_torch, "_load", lambda *args: fetched.append(args) or load(*args))
    for options in ({}, {"softcap": 2.0}, {"window": 40}):
        fetched.clear()
        plan = TorchPlan(step.batch, "fast")
        tree_attention(step.query, step.key_cache, step.value_cache, plan, scale=0.25, **options)
        assert len(fetched) == 2


@pytest.mark.parametrize("window", range(1, 9))
def test_windows_that_just_cover_or_just_miss(window: int) -> None:
    shapes: list[list[int] | int] = [[-1], [-1, 0], [-1, 0, 0], [-1, 0, 1], 2, 4]
    pairs = [(shape, length) for shape in shapes for length in range(8)]
    step = random_step(
        [shape for shape, _ in pairs], [length for _, length in pairs],
        num_heads=2, num_kv_heads=1, head_dim=8, page_size=2,
    )  # fmt: skip
    check(step, window=window)


@pytest.mark.parametrize("window", [None, 100, 256, 600])
def test_long_chains_are_cut_into_blocks(window: int | None) -> None:
    step = random_step([600, 257, 300], [0, 70, 500], num_heads=2, num_kv_heads=1, head_dim=16)
    check(step, window=window)
    check(step, window=window, softcap=2.0)
    check(step, window=window, sinks=torch.tensor([1.0, -1.0]))


def test_the_fused_low_precision_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU with bf16 matrix tiles runs, whatever this one has."""
    step = random_step([*trees(1, 9, 50), 6, 45, 1], [40, 8, 61, 30, 0, 5], dtype=torch.bfloat16)
    for native in (frozenset[torch.dtype](), frozenset({torch.bfloat16})):
        monkeypatch.setattr(cpu_torch, "NATIVE_DTYPES", native)
        for window in (None, 1, 7, 40):
            check(step, window=window)
        check(step, softcap=3.0)
        check(step, sinks=torch.linspace(-3, 3, 9).bfloat16())


@pytest.mark.parametrize("form", CPU_FORMS)
@pytest.mark.parametrize("num_nodes", [12, 70])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-3, 3, 9)], ids=["", "sinks"])
def test_a_row_depends_on_nothing_it_does_not_see(
    form: str, num_nodes: int, window: int | None, sinks: torch.Tensor | None
) -> None:
    """Bit for bit, whatever the other nodes and requests hold (extreme values included)."""
    parents = trees(num_nodes, 5, seed=3)
    step = random_step(parents, [35, 4], head_dim=16)
    if not can_run(step.batch, form):
        pytest.skip("the exact layout reads no branch as long as this tree's")
    before = attend(step, form, window=window, sinks=sinks)
    node = num_nodes - 1
    path = set()
    while node >= 0:
        path.add(node)
        node = parents[0][node]  # type: ignore[index]
    others = [n for n in range(step.batch.num_rows) if n not in path]
    assert len(others) > 5
    slots = step.batch.slots[others]
    step.key_cache.flatten(0, 1)[slots] = 1e4
    step.value_cache.flatten(0, 1)[slots] = -1e4
    step.query[others] *= -3
    after = attend(step, form, window=window, sinks=sinks)
    row = num_nodes - 1
    assert torch.equal(before[row], after[row])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("form", CPU_FORMS)
@pytest.mark.parametrize("rows", [1, 7, 32, 33, 200])
@pytest.mark.parametrize("window", [None, 5])
def test_a_chain_is_the_tree_that_is_one_path(form: str, rows: int, window: int | None) -> None:
    explicit = list(range(-1, rows - 1))
    chain = random_step([rows], [50], head_dim=16)
    tree = random_step([explicit], [50], head_dim=16)
    expected = attend(chain, form, window=window)
    torch.testing.assert_close(attend(tree, form, window=window), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", CPU_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_may_lie_anywhere(form: str, dtype: torch.dtype) -> None:
    parents = [*trees(1, 16, 40), 50]
    lengths = [130, 90, 64, 100]
    results = [
        attend(
            random_step(parents, lengths, dtype=dtype, shuffled=shuffled, page_size=page_size),
            form,
            window=window,
        )
        for window in (None, 40)
        for shuffled in (True, False)
        for page_size in (1, 16)
    ]
    rounding = {"atol": 1e-6, "rtol": torch.finfo(dtype).eps}
    for result in results[1:4]:
        torch.testing.assert_close(result, results[0], **rounding)
    for result in results[5:]:
        torch.testing.assert_close(result, results[4], **rounding)


@pytest.mark.parametrize("form", ["cpu", "torch"])
def test_one_plan_serves_layers_of_different_kinds(form: str) -> None:
    """Alternating windows, caps, head counts and dtypes must not see each other's buffers."""
    kinds: list[dict[str, Any]] = [
        {"window": None}, {"window": 8}, {"softcap": 2.0}, {"window": 8, "softcap": 2.0},
        {"sinks": True}, {"window": 8, "sinks": True},
    ]  # fmt: skip
    parents, lengths = [*trees(9, 40), 50], [30, 20, 5]
    steps = [
        random_step(parents, lengths, head_dim=16),
        random_step(parents, lengths, head_dim=32, num_heads=4, num_kv_heads=4),
        random_step(parents, lengths, head_dim=16, dtype=torch.bfloat16),
    ]
    plan = make_plan(steps[0].batch, form)
    for _ in range(2):
        for step in steps:
            for kind in kinds:
                if kind.get("sinks"):
                    kind = kind | {"sinks": torch.linspace(-3, 3, step.query.shape[1])}
                actual = tree_attention(
                    step.query, step.key_cache, step.value_cache, plan, scale=0.2, **kind
                )
                exact = dense_attention(step, scale=0.2, **kind)
                tolerance = 2 * torch.finfo(actual.dtype).eps + 1e-6
                torch.testing.assert_close(
                    actual.double(), exact, atol=8 * tolerance, rtol=8 * tolerance
                )


@pytest.mark.parametrize("form", CPU_FORMS)
def test_strided_queries_and_caches(form: str) -> None:
    """A model hands over views: heads split from a projection, layers of a stacked cache."""
    step = random_step([*trees(9, 40), 50], [30, 20, 5], head_dim=16)
    expected = attend(step, form)
    plan = make_plan(step.batch, form)
    query = step.query.transpose(0, 1).contiguous().transpose(0, 1)
    stacked = torch.stack([step.key_cache, step.value_cache], dim=2)
    actual = tree_attention(query, stacked[:, :, 0], stacked[:, :, 1], plan, scale=0.25)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("form", CPU_FORMS)
def test_a_step_without_rows(form: str) -> None:
    step = random_step([0, 0], [5, 0], head_dim=16)
    assert attend(step, form).shape == (0, 9, 16)
    assert attend(step, form, window=3, softcap=1.0).shape == (0, 9, 16)
    assert attend(step, form, sinks=torch.zeros(9)).shape == (0, 9, 16)


def test_low_precision_computes_its_softmax_in_fp32() -> None:
    """bf16 results must be the fp64 result rounded once, up to a unit in the last place."""
    step = random_step(trees(1, 16), [2000, 700], dtype=torch.bfloat16)
    exact = dense_attention(step, scale=0.125)
    actual = attend(step, "reference", scale=0.125).double()
    eps = torch.finfo(torch.bfloat16).eps
    assert ((actual - exact).abs() <= eps * exact.abs() + 1e-6).all()


def test_the_reference_can_compute_in_low_precision() -> None:
    step = random_step(trees(1, 16), [200, 70], dtype=torch.bfloat16)
    arguments = (step.query, step.key_cache, step.value_cache, step.batch)
    exact = dense_attention(step, scale=0.125)
    errors = [
        (reference_tree_attention(*arguments, scale=0.125, upcast=upcast) - exact).square().mean()
        for upcast in (True, False)
    ]
    assert errors[0] < errors[1] < 1e-4


@pytest.mark.parametrize("native", [False, True])
def test_a_row_scored_in_a_tree_is_nearly_the_row_decoded_alone(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16: the form must not change with the row count, or 30 % of the outputs round apart."""
    monkeypatch.setattr(cpu_torch, "NATIVE_DTYPES", frozenset({torch.bfloat16} if native else ()))
    step = random_step([16], [300], dtype=torch.bfloat16, shuffled=False)
    together = attend(step, "torch")
    table = step.batch.block_tables_host
    apart = torch.cat(
        [
            tree_attention(
                step.query[row : row + 1],
                step.key_cache,
                step.value_cache,
                TorchPlan(TreeBatch.from_lists([[-1]], [300 + row], table, 16), "fast"),
                scale=0.125,
            )
            for row in range(16)
        ]
    )
    assert (together != apart).float().mean() < 0.01
