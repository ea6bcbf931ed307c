"""Random trees with the law's tokens at their nodes, for the tests of `accept` in every form."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import TreeBatch, accept
from specdec_kernels.accept import Accepted

SIZES = [1, 2, 8, 8, 16, 16, 16, 63, 64, 65, 130, 256]


class Step(NamedTuple):
    """The tensors of one call."""

    batch: TreeBatch
    token_ids: Tensor
    chosen: Tensor


def random_tree(
    rng: random.Random, num_nodes: int, hit: float
) -> tuple[list[int], list[int], list[int]]:
    """(parents, tokens, law): siblings differ, in any order; at `hit` of the inner nodes the law's
    token is a child's, elsewhere it may still be one that stands elsewhere in the tree."""
    depth = rng.choice([1, 3, 300])
    parents = [-1] + [rng.randrange(max(0, node - depth), node) for node in range(1, num_nodes)]
    children: list[list[int]] = [[] for _ in parents]
    for node in range(1, num_nodes):
        children[parents[node]].append(node)
    tokens = [rng.randrange(300)] * num_nodes
    law = [rng.choice([-1, 7, 2**40])] * num_nodes
    for node, below in enumerate(children):
        token, step = rng.randrange(300), rng.choice([1, 7, 299])  # coprime to 300
        for child in below:
            tokens[child] = token = (token + step) % 300
        if below and rng.random() < hit:
            law[node] = tokens[rng.choice(below)]
        elif rng.random() < 0.7:
            law[node] = rng.randrange(300)
    return parents, tokens, law


def random_step(seed: int, num_requests: int) -> Step:
    """Trees of 1 to 256 nodes, small ones more often, chains of 0 to 256 rows among them."""
    rng = random.Random(seed)
    parents: list[list[int] | int] = []
    token_ids: list[int] = []
    chosen: list[int] = []
    for _ in range(num_requests):
        size = rng.choice(SIZES)
        tree, tokens, law = random_tree(
            rng, rng.randint(max(1, size // 2), size), rng.choice([0.5, 0.95, 1])
        )
        is_chain = all(parent == node - 1 for node, parent in enumerate(tree))
        parents.append(len(tree) if is_chain else tree)
        token_ids += tokens
        chosen += law
        if rng.random() < 0.02:
            parents.append(0)
    return make_step(parents, token_ids, chosen)


def make_step(parents: list[list[int] | int], token_ids: list[int], chosen: list[int]) -> Step:
    """A step without committed tokens; pages play no part."""
    tables = [[0] * (2 if isinstance(p, list) or p > 0 else 0) for p in parents]
    batch = TreeBatch.from_lists(parents, [0] * len(parents), tables, 128)
    return Step(batch, *torch.tensor([token_ids, chosen], dtype=torch.int64).unbind())


def check(step: Step, actual: Accepted, max_depth: int) -> int:
    """Equal to the walk in all three results; returns the drafted nodes accepted."""
    expected = accept(*step, max_depth=max_depth, impl="reference")
    for name, result in actual._asdict().items():
        wanted = getattr(expected, name)
        assert result.dtype == wanted.dtype
        assert torch.equal(result, wanted), name
    return int(expected.num_accepted.sum())
