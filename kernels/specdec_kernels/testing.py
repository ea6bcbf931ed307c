"""Random steps, an independent oracle and error budgets, for tests of these operations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.quantise import dequantise, quantise

POISON = float("nan")


@dataclass(frozen=True, eq=False)
class RandomStep:
    """One step with random contents, paged and dense.

    query: [S, Hq, D]. key_cache, value_cache: [num_pages, page_size, Hkv, D]; every slot that no
    request owns holds NaN, the tails of last pages too. keys, values: per request [L + rows, Hkv,
    D], the same contents in logical order, for an oracle that knows nothing of pages.
    """

    batch: TreeBatch
    parents: list[list[int] | int]
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def random_tree(rng: random.Random, num_nodes: int) -> list[int]:
    """Parents of a tree whose nodes choose their parent freely among the earlier nodes."""
    return [-1] + [rng.randrange(node) for node in range(1, num_nodes)]


def random_step(
    parents: Sequence[list[int] | int],
    committed_lens: Sequence[int],
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    shuffled: bool = True,
    seed: int = 0,
    spare_pages: int = 3,
) -> RandomStep:
    """Random queries, keys and values for the given trees, chains and lengths.

    shuffled: spread the requests over pages in random order, with `spare_pages` unowned ones in
    between; otherwise every request gets consecutive pages. Contents depend on seed, shapes and
    dtype only, not on the pages.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [p if isinstance(p, int) else len(p) for p in parents]
    lengths = [length + n for length, n in zip(committed_lens, rows, strict=True)]
    counts = [-(-length // page_size) for length in lengths]
    free = list(range(sum(counts) + spare_pages))
    if shuffled:
        random.Random(seed).shuffle(free)
    tables = []
    for count in counts:
        tables.append(free[:count])
        del free[:count]
    batch = TreeBatch.from_lists(parents, committed_lens, tables, page_size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    query = normal(sum(rows), num_heads, head_dim)
    keys = [normal(length, num_kv_heads, head_dim) for length in lengths]
    values = [normal(length, num_kv_heads, head_dim) for length in lengths]
    shape = (sum(counts) + spare_pages, page_size, num_kv_heads, head_dim)
    caches = torch.full((2, *shape), POISON, dtype=dtype)
    for table, request_keys, request_values in zip(tables, keys, values, strict=True):
        for slot, (key, value) in enumerate(zip(request_keys, request_values, strict=True)):
            page, offset = table[slot // page_size], slot % page_size
            caches[0, page, offset] = key
            caches[1, page, offset] = value
    return RandomStep(batch, list(parents), query, caches[0], caches[1], keys, values)


def quantised_step(step: RandomStep, dtype: torch.dtype) -> tuple[RandomStep, Tensor, Tensor]:
    """The step with caches of int8 or float8_e4m3fn, and the scales of its keys and values.

    `keys` and `values` become what the caches then mean, in fp32. Slots that no request owns have
    NaN scales.
    """
    key_cache, key_scales = quantise(step.key_cache, dtype)
    value_cache, value_scales = quantise(step.value_cache, dtype)
    keys, values = (
        [dequantise(*quantise(rows, dtype), torch.float32) for rows in dense]
        for dense in (step.keys, step.values)
    )
    changed = replace(step, key_cache=key_cache, value_cache=value_cache, keys=keys, values=values)
    return changed, key_scales, value_scales


def dense_attention(
    step: RandomStep,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """What attention should give, [S, Hq, D] of `dtype`, one row after the other.

    Shares no code with the operations: it walks parents instead of reading ancestor words, and
    reads dense keys instead of pages. In the inputs' own low dtype it is the independent
    evaluation that `assert_matches_low_precision_reference` wants.
    """
    rows = []
    query = iter(step.query.to(dtype))
    for request, tree in enumerate(step.parents):
        keys, values = step.keys[request].to(dtype), step.values[request].to(dtype)
        parents = list(range(-1, tree - 1)) if isinstance(tree, int) else tree
        committed = keys.shape[0] - len(parents)
        for node in range(len(parents)):
            path = []
            above = node
            while above >= 0:
                path.append(above)
                above = parents[above]
            # Logical slot and logical position of everything on the way from token 0 to the node.
            slots = [*range(committed), *(committed + n for n in reversed(path))]
            kept = slots if window is None else slots[-window:]
            rows.append(_attend(next(query), keys[kept], values[kept], scale, softcap, sinks))
    return torch.stack(rows) if rows else step.query.to(dtype)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    kv_heads = keys.shape[1]
    grouped = query.view(kv_heads, -1, query.shape[-1])
    scores = torch.stack([grouped[h] @ keys[:, h].T for h in range(kv_heads)]) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    sink = scores.new_full((kv_heads, 1, 1), float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(kv_heads, -1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = torch.exp(scores - top)
    weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(sink - top))
    return torch.cat([weights[h] @ values[:, h] for h in range(kv_heads)])


def assert_matches_low_precision_reference(
    actual: Tensor, high: Tensor, low: Tensor, name: str
) -> None:
    """Is `actual` about as good as an honest evaluation in its own precision?

    high: the result in much higher precision. low: the result of an independent evaluation in the
    precision of `actual`. The budget is twice the error of `low` plus a rounding band: one unit in
    the last place of the largest result, or eight in fp32, where sums are not kept in anything
    wider: over 200 elements two honest orders differ by that many roundings. It holds for the
    largest error and for the root mean square.

    Raises AssertionError with the name and both errors.
    """
    assert actual.shape == high.shape == low.shape, f"{name}: shapes differ"
    assert actual.dtype == low.dtype, f"{name}: got {actual.dtype}, expected {low.dtype}"
    assert bool(torch.isfinite(actual).all()), f"{name}: not finite"
    if not actual.numel():
        return
    eps = torch.finfo(actual.dtype).eps * (8 if actual.dtype == torch.float32 else 1)
    exact = high.double()
    error, reference_error = actual.double() - exact, low.double() - exact
    worst, budget = error.abs().max(), 2 * reference_error.abs().max() + eps * exact.abs().max()
    assert worst <= budget, f"{name}: error {worst:.3e} is above the budget {budget:.3e}"
    worst = error.square().mean().sqrt()
    budget = 2 * reference_error.square().mean().sqrt() + eps * exact.square().mean().sqrt()
    assert worst <= budget, f"{name}: RMS error {worst:.3e} is above the budget {budget:.3e}"
