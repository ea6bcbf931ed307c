"""The walk without a model: exactly enumerated, sampled through the law, and broken on purpose.

The last part takes the walk's own source, breaks one line and shows that the law check notices:
without it, a law check that cannot fail would look the same as a walk that is right.
"""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import specdec.verify
from specdec.request import SamplingParams, Speculation
from specdec.request_state import Request
from specdec.sampling.answer import Answer
from specdec.sampling.law import Choice, TokenLaw
from specdec.step import RowLogits
from specdec.testing import RandomDrafter, assert_law, law_check
from specdec.testing.enumeration import (
    Emitted,
    Law,
    Path,
    Sampler,
    Tree,
    independent,
    keep_likelier_of_two,
    most_probable,
    without_replacement,
    worst_error,
)
from specdec_drafts.base import DraftRequest
from specdec_drafts.tree import TokenTree, TreeBuilder

Walk = Callable[..., Any]
V = 3

# ---- exactly ----


class _ChosenTokens:
    """A law whose token at each node is given; it stands for request.law and for the logits."""

    def __init__(self, token_of_node: dict[int, int]) -> None:
        self._token_of_node = token_of_node

    def row(self, node: int) -> int:
        return node

    def choose(self, node: int, position: int) -> Choice:
        return Choice(self._token_of_node[node], None)

    def append(self, token_id: int) -> None:
        """History plays no part in a given law."""


def _product_walk(tree: Tree, target: Law, draft: Law) -> Emitted:
    """The law over paths of specdec.verify.walk: every assignment of tokens to nodes is tried."""
    builder = TreeBuilder(0)
    paths: dict[int, Path] = {0: ()}

    def add(subtree: Tree, node: int) -> None:
        for token, below in subtree:
            child = builder.add(node, token, 0.5)
            paths[child] = (*paths[node], token)
            add(below, child)

    add(tree, 0)
    flat = builder.build()
    emitted: Emitted = defaultdict(float)
    for tokens in itertools.product(range(V), repeat=flat.num_nodes):
        chosen = _ChosenTokens(dict(enumerate(tokens)))
        request = SimpleNamespace(
            law=chosen, token_ids=[0], answer=SimpleNamespace(append=lambda token, logprobs: None)
        )
        verdict = specdec.verify.walk(request, flat, chosen)  # type: ignore[arg-type]
        prob = 1.0
        for node, token in enumerate(tokens):
            prob *= float(target(paths[node])[token])
        emitted[tuple(verdict.emitted)] += prob
    return emitted


@pytest.mark.parametrize(
    ("shape", "sampler"),
    [
        ((2,), without_replacement),
        ((2, 1), most_probable),
        ((1, 1), without_replacement),
        ((2, 1), independent),
        ((1,), keep_likelier_of_two),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_walk_emits_the_targets_law_exactly(shape: Path, sampler: Sampler) -> None:
    assert worst_error(shape, sampler, _product_walk) < 1e-12


# ---- through the real law ----

PROMPT = (0, 1)
LENGTH = 3
# Of second order: a token's law depends on the two before it, so a wrong branch cannot hide.
LAWS = np.random.default_rng(3).dirichlet([1.0] * V, size=(V, V)).astype(np.float32)
JOINT = [
    float(LAWS[PROMPT][a] * LAWS[PROMPT[1], a, b] * LAWS[a, b, c])
    for a, b, c in itertools.product(range(V), repeat=LENGTH)
]


def _logits(request: Request, tree: TokenTree) -> RowLogits:
    """What a target with LAWS says at each node."""
    rows = [LAWS[request.token_ids[-2], request.token_ids[-1]]]
    for node in range(1, tree.num_nodes):
        rows.append(LAWS[tree.token_ids[tree.parents[node]], tree.token_ids[node]])
    return RowLogits(torch.from_numpy(np.log(np.stack(rows))))


def _sample(walk: Walk, num_samples: int, first_seed: int) -> list[int]:
    """Joint cells of three tokens after PROMPT, each request a few steps with random trees."""
    drafter = RandomDrafter(V, max_nodes=20)
    cells = []
    for seed in range(first_seed, first_seed + num_samples):
        params = SamplingParams(temperature=1.0, seed=seed).resolved({}, seed)
        law = TokenLaw(params, PROMPT, V, "raw_logprobs")
        answer = Answer(params, frozenset(), None, LENGTH)
        request = Request(str(seed), PROMPT, params, Speculation(), law, answer)
        while answer.finish_reason is None:
            view = DraftRequest(str(seed), request.token_ids, 2, 20, 20, 1.0, seed)
            tree = drafter.tree(view)
            walk(request, tree, _logits(request, tree))
        cell = 0
        for token in answer.token_ids:
            cell = cell * V + token
        cells.append(cell)
    return cells


@pytest.mark.statistical
def test_sampled_walk_follows_the_law() -> None:
    assert_law(lambda attempt: _sample(specdec.verify.walk, 4000, attempt * 4000), JOINT)


MUTANTS = {
    "judges every node by the root's row": ("logits.row(node)", "logits.row(0)"),
    "uses one position's noise for all": ("len(request.token_ids))", "1)"),
    "descends into the first child whatever the law says": (
        "children.get((node, choice.token_id))",
        "next((n for (p, _), n in children.items() if p == node), None)",
    ),
    "looks for the child below the root": (
        "children.get((node, choice.token_id))",
        "children.get((0, choice.token_id))",
    ),
    "reads the last row after a descent": (
        "node = child\n",
        "node = tree.num_nodes - 1\n",
    ),
}


@pytest.mark.statistical
@pytest.mark.parametrize("mutant", MUTANTS)
def test_law_check_fails_for_a_broken_walk(mutant: str) -> None:
    source = inspect.getsource(specdec.verify)
    right, wrong = MUTANTS[mutant]
    assert source.count(right) == 1, f"the walk has changed: {right!r} is not in it once"
    namespace: dict[str, Any] = {"__name__": "broken_walk"}
    exec(compile(source.replace(right, wrong), "broken_walk", "exec"), namespace)
    assert law_check(_sample(namespace["walk"], 4000, 0), JOINT).p_value < 1e-5
