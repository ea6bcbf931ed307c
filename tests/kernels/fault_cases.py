"""Rows N1, N3 and N5 of the faults other systems shipped, for every form of tree attention.

`test_attention_faults.py` runs them on the forms for the CPU, `interpreted_tree_attention.py` on
Triton's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels import tree_attention
from specdec_kernels.testing import RandomStep, random_step, random_tree
from tests.kernels.forms import make_plan

HEADS = [(9, 3), (6, 2), (12, 4), (15, 5), (8, 1), (7, 1), (24, 1), (40, 1), (96, 6), (6, 6)]
ROWS = [1, 5, 17]
CONTEXTS = [1, 15, 16, 17, 1000]
HEAD_DIMS = [64, 72, 80, 96, 112, 128, 160, 192, 256]
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


def attend(
    step: RandomStep, form: str, *, scale: float, window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    plan = make_plan(step.batch, form)
    return tree_attention(
        step.query, step.key_cache, step.value_cache, plan, scale=scale, window=window, sinks=sinks
    )


def check_head_group(
    heads: tuple[int, int], rows: int, contexts: Sequence[int], dtype: torch.dtype, form: str
) -> None:
    """N1: one ragged batch of a tree at every context and a chain, against SDPA."""
    rng = random.Random(rows)
    parents: list[list[int] | int] = [random_tree(rng, rows) for _ in contexts]
    step = random_step(
        [*parents, rows], [*contexts, contexts[0]], num_heads=heads[0], num_kv_heads=heads[1],
        head_dim=32, dtype=dtype,
    )  # fmt: skip
    check_against_sdpa(step, form)


def check_head_dim(head_dim: int, prompt_rows: int, dtype: torch.dtype, form: str) -> None:
    """N3: a decoded row, a tree to verify and rows of a prompt, against SDPA."""
    parents: list[list[int] | int] = [[-1], random_tree(random.Random(3), 16), prompt_rows]
    step = random_step(
        parents, [70, 33, 5], num_heads=6, num_kv_heads=2, head_dim=head_dim, dtype=dtype
    )
    check_against_sdpa(step, form)


def check_against_sdpa(step: RandomStep, form: str) -> None:
    """The largest difference; values are halved, or results above 2 would differ by rounding."""
    for values in (step.value_cache, *step.values):
        values.mul_(0.5)
    scale = step.query.shape[2] ** -0.5
    actual = attend(step, form, scale=scale)
    assert actual.dtype == step.query.dtype
    worst = float((actual.float() - sdpa(step, scale)).abs().max())
    assert worst <= TOLERANCES[step.query.dtype], f"{form}: {worst:.2e}"


def sdpa(step: RandomStep, scale: float) -> Tensor:
    """fp32 attention of torch over the dense keys, with masks made by walking the parents."""
    results = []
    queries = step.query.float().split(
        [tree if isinstance(tree, int) else len(tree) for tree in step.parents]
    )
    for query, tree, keys, values in zip(
        queries, step.parents, step.keys, step.values, strict=True
    ):
        parents = list(range(-1, tree - 1)) if isinstance(tree, int) else tree
        committed = keys.shape[0] - len(parents)
        seen = torch.zeros(len(parents), keys.shape[0], dtype=torch.bool)
        seen[:, :committed] = True
        for node, parent in enumerate(parents):
            if parent >= 0:
                seen[node] |= seen[parent]
            seen[node, committed + node] = True
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.float().transpose(0, 1)[None],
            values.float().transpose(0, 1)[None],
            attn_mask=seen, scale=scale, enable_gqa=True,
        )  # fmt: skip
        results.append(attended[0].transpose(0, 1))
    return torch.cat(results)


def check_padded_nodes(form: str) -> None:
    """N5: a tree of 8 slots of which 5 are used, an empty request and one without a prefix.

    A row that sees nothing cannot be expressed here: a node sees at least itself. The padded nodes
    are therefore children of the root that nobody asks for. Every slot that the real rows may not
    see holds values of 1e4, so that a weight on one of them shows.
    """
    tree = random_tree(random.Random(5), 5)
    alone = random_step([tree], [20], head_dim=16, seed=1)
    step = random_step([[*tree, 0, 0, 0], 0, 0, [-1]], [20, 0, 7, 0], head_dim=16, seed=1)
    step.key_cache.nan_to_num_(nan=1e4)
    step.value_cache.nan_to_num_(nan=1e4)
    slots = step.batch.block_tables[0].long()[:, None] * 16 + torch.arange(16)
    for cache, dense in ((step.key_cache, alone.keys[0]), (step.value_cache, alone.values[0])):
        cache.flatten(0, 1)[slots.flatten()[:25]] = dense
    step.value_cache.flatten(0, 1)[step.batch.slots[5:8]] = 1e4
    step.query[:5] = alone.query
    for window in (None, 3):
        actual = attend(step, form, scale=0.25, window=window)
        assert bool(torch.isfinite(actual).all())
        expected = attend(alone, form, scale=0.25, window=window)
        torch.testing.assert_close(actual[:5], expected, atol=1e-6, rtol=1e-5)
        first_token = step.values[3][0].repeat_interleave(3, dim=0)
        torch.testing.assert_close(actual[8], first_token, atol=0, rtol=0)


def check_rows_that_see_themselves_only(form: str) -> None:
    """N5: whole tiles of keys are hidden, before and after the one key that is seen.

    The weights exp(max - max) = 1 of a tile in which nothing was seen, once carried on, would mix
    in the values of 1e4 that stand everywhere else.
    """
    tree = random_tree(random.Random(2), 70)
    lengths = [0, 1, 63, 64, 65, 130]
    step = random_step([tree, [-1], 70, [-1, 0, 0], [-1], 5], lengths, num_heads=2,
                       num_kv_heads=2, head_dim=16)  # fmt: skip
    own = step.value_cache.flatten(0, 1)[step.batch.slots]
    keys = step.key_cache.flatten(0, 1)[step.batch.slots]
    step.key_cache.nan_to_num_(nan=1e4)
    step.value_cache.fill_(1e4).flatten(0, 1)[step.batch.slots] = own
    assert torch.equal(attend(step, form, scale=0.25, window=1), own)
    sinks = torch.tensor([0.5, -3.0])
    scores = (step.query * keys).sum(-1) * 0.25
    expected = own * torch.sigmoid(scores - sinks).unsqueeze(-1)
    actual = attend(step, form, scale=0.25, window=1, sinks=sinks)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def check_scores_below_any_floor(form: str) -> None:
    """N5: what is seen scores -2e31 and what is hidden 0; a finite mask value would let it win."""
    tree = [-1, 0, 0, 1]
    step = random_step([tree], [9], num_heads=1, num_kv_heads=1, head_dim=16)
    step.query.fill_(2.0**50)
    keys, values = step.key_cache.flatten(0, 1), step.value_cache.flatten(0, 1)
    hidden = step.batch.slots[2]
    keys.fill_(-(2.0**50))
    keys[hidden] = 0.0
    values[hidden] = 1e4
    actual = attend(step, form, scale=1.0)
    seen = torch.cat([step.values[0][:9], step.values[0][[9, 10, 12]]])
    torch.testing.assert_close(actual[3], seen.mean(0), atol=1e-5, rtol=1e-5)
