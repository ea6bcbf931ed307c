"""The parts of a step, each alone: tree build, layout, attention, walk."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from specdec.request import SamplingParams, Speculation
from specdec.request_state import Request
from specdec.sampling.answer import Answer
from specdec.sampling.law import TokenLaw
from specdec.step import RowLogits
from specdec.verify import walk
from specdec_drafts import DraftRequest, TokenTree, TreeBuilder
from specdec_drafts.ngram import NgramDrafter
from specdec_kernels import TreeBatch, plan_tree_attention, tree_attention
from tests.benchmarks.conftest import TREE_SHAPE, Size

PAGE_SIZE = 16


def shaped_tree(vocab_size: int) -> TokenTree:
    """A tree of TREE_SHAPE with distinct siblings."""
    builder = TreeBuilder(0)
    level = [0]
    for width in TREE_SHAPE:
        level = [
            builder.add(parent, (31 * parent + child) % vocab_size, 0.5)
            for parent in level
            for child in range(width)
        ]
    return builder.build()


def bench_tree_build(benchmark: BenchmarkFixture, size: Size) -> None:
    """ngram's tree for the next token of a text that repeats itself in variations."""
    rng = random.Random(0)
    phrases = [[rng.randrange(size.vocab_size) for _ in range(6)] for _ in range(8)]
    tokens = [token for _ in range(size.context // 6) for token in rng.choice(phrases)]
    request = DraftRequest("0", tokens, 16, max_nodes=15, max_depth=15, temperature=0.0, seed=0)
    drafter = NgramDrafter()
    drafter.propose([request])  # the index of the prompt is built once
    (tree,) = benchmark(drafter.propose, [request])
    assert tree.num_drafted > 0


def flat_batch(num_rows: int, size: Size) -> TreeBatch:
    """One request: a single node, or the benchmark's tree."""
    parents: Any = [-1] if num_rows == 1 else shaped_tree(size.vocab_size).parents
    num_pages = -(-(size.context + len(parents)) // PAGE_SIZE)
    return TreeBatch.from_lists(
        [list(parents)], [size.context], [list(range(num_pages))], PAGE_SIZE
    )


def bench_layout(benchmark: BenchmarkFixture, size: Size) -> None:
    """Host lists to the tensors of a flat batch and the attention plan."""
    plan = benchmark(lambda: plan_tree_attention(flat_batch(21, size)))
    assert plan is not None


@pytest.mark.parametrize("num_rows", [1, 21], ids=["plain", "tree20"])
def bench_attention(benchmark: BenchmarkFixture, size: Size, num_rows: int) -> None:
    """One layer's call for one request; its plan has been made before, as in a step."""
    batch = flat_batch(num_rows, size)
    generator = torch.Generator().manual_seed(0)
    shape = (len(batch.block_tables_host[0]), PAGE_SIZE, size.num_kv_heads, size.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(size.dtype) for _ in range(2))
    query = torch.randn(num_rows, size.num_heads, size.head_dim, generator=generator)
    query = query.to(size.dtype)
    plan = plan_tree_attention(batch)
    scale = size.head_dim**-0.5
    out = benchmark(lambda: tree_attention(query, keys, values, plan, scale=scale))
    assert out.shape == query.shape


@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
def bench_walk(benchmark: BenchmarkFixture, size: Size, temperature: float) -> None:
    """A walk of four visited nodes: three accepted, and the bonus."""
    tree = shaped_tree(size.vocab_size)
    path = [0, 1, 5, 13]
    assert [tree.parents[node] for node in path[1:]] == path[:-1]
    rows = np.random.default_rng(0).normal(size=(tree.num_nodes, size.vocab_size))
    for node, child in itertools.pairwise(path):
        rows[node, tree.token_ids[child]] = 60.0
    logits = torch.from_numpy(rows).to(size.dtype)
    params = SamplingParams(temperature=temperature, max_tokens=100, seed=0).resolved({}, 0)

    def fresh_request() -> tuple[Any, dict[str, Any]]:
        law = TokenLaw(params, [0], size.vocab_size, "raw_logprobs")
        answer = Answer(params, frozenset(), None, 100)
        request = Request("0", [0], params, Speculation(), law, answer)
        return (request, tree, RowLogits(logits)), {}

    verdict = benchmark.pedantic(walk, setup=fresh_request, rounds=200, warmup_rounds=5)
    assert list(verdict.path) == path
