"""Head counts and head dimensions, on Llamas of one layer."""

from __future__ import annotations

import itertools

import pytest

from specdec import LLM, SamplingParams, Speculation
from specdec.testing import (
    RandomDrafter,
    random_prompts,
    reference_generate,
    tiny_llama,
)
from tests.architectures.flat import worst_row

HEADS = ((9, 3), (6, 2), (8, 1), (4, 4))
DIMS = (64, 72, 80, 96, 112, 128, 160)
GRID = list(itertools.product(HEADS, DIMS))
# Every number of heads and every dimension occurs; the rest of the grid is slow.
DIAGONAL = [(HEADS[i % len(HEADS)], dim) for i, dim in enumerate(DIMS)]


def llama(heads: tuple[int, int], dim: int) -> object:
    return tiny_llama(
        vocab_size=128, hidden_size=72, num_layers=1, num_heads=heads[0], num_kv_heads=heads[1],
        head_dim=dim, max_positions=128,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "dim"),
    [
        pytest.param(*item, marks=() if item in DIAGONAL else pytest.mark.slow, id=f"{item}")
        for item in GRID
    ],
)
def test_heads_and_dimensions(heads: tuple[int, int], dim: int) -> None:
    model = llama(heads, dim)
    assert worst_row(model) < 1e-4
    prompts = random_prompts(4, vocab_size=128, longest=30, seed=dim)
    llm = LLM(model, draft=RandomDrafter(128), num_pages=64)
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=0.0, max_tokens=12),
        speculation=Speculation(mode="fixed", max_nodes=16),
    )
    assert sum(output.stats.num_draft_tokens for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == reference_generate(model, prompt, 12)
