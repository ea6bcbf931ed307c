"""The engine's samples follow the target's law, for every draft: chi-square against exact laws.

A sample is the joint cell of three tokens, which one or two steps emit, so drafted, bonus and later
positions are all judged, and so is their independence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

import specdec.engine
import specdec.verify
from specdec import LLM, SamplingParams, Speculation
from specdec.testing import (
    RandomDrafter,
    ScriptedDrafter,
    assert_law,
    constant_law_model,
    law_check,
    markov_model,
)
from specdec_drafts.base import DraftRequest

pytestmark = pytest.mark.statistical

Table = list[list[float]]
CONST: list[float] = [0.4, 0.3, 0.2, 0.1, 0.0]
MARKOV: Table = [
    [0.5, 0.3, 0.2, 0.0],
    [0.1, 0.6, 0.0, 0.3],
    [0.25, 0.05, 0.7, 0.0],
    [0.0, 0.0, 0.9, 0.1],
]
PROMPT = [0, 1, 2, 1, 0, 2, 0, 1]  # with repeats, for ngram to find
LENGTH = 3
SIZES = [2000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


def joint(table: Table, last: int, length: int = LENGTH) -> list[float]:
    """Law of `length` tokens after `last`, cells in the order of itertools.product."""
    law = []
    for path in itertools.product(range(len(table)), repeat=length):
        probs = [table[t][x] for t, x in zip((last, *path), path, strict=False)]
        law.append(float(np.prod(probs)))
    return law


def cell(token_ids: Sequence[int], vocab_size: int) -> int:
    index = 0
    for token in token_ids:
        index = index * vocab_size + token
    return index


def likeliest(table: Table, width: int, depth: int) -> Callable[[DraftRequest], list[list[int]]]:
    """Paths of the `width` most probable tokens at each step: SELF's greedy chain for width 1."""

    def paths(request: DraftRequest) -> list[list[int]]:
        found = [[request.token_ids[-1]]]
        for _ in range(depth):
            found = [
                [*path, int(token)]
                for path in found
                for token in np.argsort(-np.array(table[path[-1]]), kind="stable")[:width]
            ]
        return [path[1:] for path in found]

    return paths


def draft(kind: str, table: Table) -> Any:
    """A draft for a model whose law is `table`."""
    size = len(table)
    return {
        "none": "none",
        "ngram": "ngram",
        "self-chain": ScriptedDrafter(likeliest(table, 1, 3)),
        "self-tree": ScriptedDrafter(likeliest(table, 2, 3)),
        "least-likely": ScriptedDrafter(lambda r: [[int(np.argmin(table[r.token_ids[-1]]))]]),
        "noisy-chain": RandomDrafter(size, 3),
        "random-tree": RandomDrafter(size, max_nodes=10),
        "full-tree": RandomDrafter(size, (size, 2)),
    }[kind]


KINDS = ("none", "ngram", "self-chain", "self-tree", "least-likely", "noisy-chain", "random-tree",
         "full-tree")  # fmt: skip


def sampler(
    model: PreTrainedModel, drafter: Any, count: int, **fields: Any
) -> Callable[[int], list[int]]:
    """A source of `count` samples for `assert_law`."""
    llm = LLM(
        model, draft=drafter, max_num_seqs=128, max_batch_tokens=4096, num_pages=512,
        prefix_cache=False,
    )  # fmt: skip
    speculation = Speculation(mode="fixed", max_nodes=16, max_depth=4)
    fields = {"temperature": 1.0, "max_tokens": LENGTH, **fields}

    def sample(attempt: int) -> list[int]:
        first = attempt * count
        params = [SamplingParams(seed=seed, **fields) for seed in range(first, first + count)]
        outputs = llm.generate([PROMPT] * count, params, speculation=speculation)
        return [cell(output.token_ids, llm.engine.vocab_size) for output in outputs]

    return sample


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_constant_law(kind: str, count: int) -> None:
    table = [CONST] * len(CONST)
    sample = sampler(constant_law_model(CONST), draft(kind, table), count)
    assert_law(sample, joint(table, PROMPT[-1]), label=kind)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_markov_law(kind: str, count: int) -> None:
    sample = sampler(markov_model(MARKOV), draft(kind, MARKOV), count)
    assert_law(sample, joint(MARKOV, PROMPT[-1]), label=kind)


def renormalised(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


FILTERED: dict[str, tuple[dict[str, float], list[float]]] = {
    "temperature": ({"temperature": 0.5}, renormalised([0.16, 0.09, 0.04, 0.01, 0.0])),
    "top_k": ({"top_k": 2}, renormalised([0.4, 0.3, 0.0, 0.0, 0.0])),
    "top_p": ({"top_p": 0.85}, renormalised([0.4, 0.3, 0.2, 0.0, 0.0])),
    "min_p": ({"min_p": 0.4}, renormalised([0.4, 0.3, 0.2, 0.0, 0.0])),
    # On the tempered law (.533, .3, .133, .033): top-p takes two, min-p both of them.
    "all": (
        {"temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.3},
        renormalised([0.16, 0.09, 0.0, 0.0, 0.0]),
    ),
}


@pytest.mark.parametrize("kind", ["none", "self-tree", "random-tree"])
@pytest.mark.parametrize("name", FILTERED)
def test_filters_renormalise_the_law(name: str, kind: str) -> None:
    fields, law = FILTERED[name]
    table = [CONST] * len(CONST)
    sample = sampler(constant_law_model(CONST), draft(kind, table), 1000, **fields)
    assert_law(sample, joint([law] * len(law), PROMPT[-1]), label=f"{name} {kind}")


def test_law_check_fails_for_an_engine_whose_walk_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same test as above, with a walk that takes its tokens from the tree."""

    def believes_the_draft(request: Any, tree: Any, logits: Any) -> Any:
        right = specdec.verify.walk(request, tree, logits)
        if tree.num_nodes > 1 and len(right.path) == 1 and request.answer.finish_reason is None:
            request.token_ids[-1] = request.answer.token_ids[-1] = tree.token_ids[1]
        return right

    monkeypatch.setattr(specdec.engine, "walk", believes_the_draft)
    sample = sampler(markov_model(MARKOV), draft("self-chain", MARKOV), 2000)
    assert law_check(sample(0), joint(MARKOV, PROMPT[-1])).p_value < 1e-5
