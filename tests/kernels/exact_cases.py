"""Rows scored in trees, and the same rows decoded alone once their ancestors are committed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import TreeBatch, tree_attention
from specdec_kernels.testing import RandomStep, random_step
from tests.kernels.forms import make_plan

PAGE_SIZE = 16


@dataclass(frozen=True, eq=False)
class Trial:
    """A step with one tree, and per node what decoding it alone gives."""

    step: RandomStep
    options: dict[str, Any]


def shallow_tree(rng: random.Random, num_nodes: int, most_private: int = 15) -> list[int]:
    """A random tree whose principal path comes first and may be deep; branches are short."""
    trunk = rng.randint(1, num_nodes)
    parents, private, depths = list(range(-1, trunk - 1)), [0] * trunk, list(range(trunk))
    while len(parents) < num_nodes:
        parent = rng.randrange(len(parents))
        # A second child of the trunk's last node would continue the principal path elsewhere.
        if private[parent] < most_private and parent != trunk - 1:
            parents.append(parent)
            private.append(private[parent] + 1)
            depths.append(depths[parent] + 1)
        elif trunk == 1:
            trunk = num_nodes + 1
            parents.append(0)
            private.append(0)
            depths.append(1)
    return parents


def trials(count: int, seed: int, most_committed: int = 1200, **shape: Any) -> Iterator[Trial]:
    """Random trees among neighbours of other kinds, with random lengths and layer options."""
    rng = random.Random(seed)
    for index in range(count):
        tree = shallow_tree(rng, rng.choice([1, 2, 5, 16, 24]))
        committed = rng.choice([0, rng.randrange(40), rng.randrange(most_committed)])
        step = random_step(
            [tree, rng.randrange(4), shallow_tree(rng, 3)], [committed, rng.randrange(30), 9],
            page_size=PAGE_SIZE, seed=seed * 1000 + index, **shape,
        )  # fmt: skip
        options: dict[str, Any] = {"scale": step.query.shape[2] ** -0.5}
        if rng.random() < 0.3:
            options["window"] = rng.choice([1, 7, 16, 17, 100, 600])
        if rng.random() < 0.2:
            options["softcap"] = 5.0
        if rng.random() < 0.2:
            options["sinks"] = torch.randn(step.query.shape[1])
        yield Trial(step, options)


def run(step: RandomStep, form: str, options: dict[str, Any]) -> Tensor:
    plan = make_plan(step.batch, form)
    return tree_attention(step.query, step.key_cache, step.value_cache, plan, **options)


def alone_step(step: RandomStep, node: int, *, as_chain: bool) -> RandomStep:
    """Node `node` of the first request after its ancestors were committed, in other pages."""
    parents, path = step.parents[0], []
    assert isinstance(parents, list)
    above = node
    while above >= 0:
        path.append(above)
        above = parents[above]
    committed = step.batch.committed_lens_host[0]
    dense = [*range(committed), *(committed + n for n in reversed(path))]
    num_pages = -(-len(dense) // PAGE_SIZE)
    caches = []
    for cache, contents in ((step.key_cache, step.keys[0]), (step.value_cache, step.values[0])):
        alone = torch.full((num_pages, PAGE_SIZE, *cache.shape[2:]), float("nan"))
        alone.flatten(0, 1)[: len(dense)] = contents[dense].float()
        caches.append(alone.to(cache.dtype))
    tree: list[int] | int = 1 if as_chain else [-1]
    batch = TreeBatch.from_lists([tree], [len(dense) - 1], [list(range(num_pages))], PAGE_SIZE)
    keys, values = [step.keys[0][dense]], [step.values[0][dense]]
    return RandomStep(batch, [tree], step.query[node : node + 1], *caches, keys, values)


def reordered(step: RandomStep, rng: random.Random) -> tuple[RandomStep, list[int]]:
    """The one tree of the step with its nodes in another order, parents still first, and the order.

    Keys and values per request are left out: an oracle is not what this is for.
    """
    parents = step.parents[0]
    assert isinstance(parents, list)
    order, ready = [], [0]
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        order.append(node)
        ready += [child for child, parent in enumerate(parents) if parent == node]
    place = {node: index for index, node in enumerate(order)}
    moved: list[list[int] | int] = [[-1 if parents[n] < 0 else place[parents[n]] for n in order]]
    old, slots = step.batch, step.batch.slots
    batch = TreeBatch.from_lists(
        moved, old.committed_lens_host, old.block_tables_host, old.page_size
    )
    caches = []
    for cache in (step.key_cache, step.value_cache):
        changed = cache.clone()
        changed.flatten(0, 1)[slots] = cache.flatten(0, 1)[slots[order]]
        caches.append(changed)
    return RandomStep(batch, moved, step.query[order], *caches, [], []), order


def differing_rows(form: str, count: int, seed: int, **shape: Any) -> tuple[int, int]:
    """(rows with a differing bit, rows) over `count` rows that are drawn from random trials."""
    rng = random.Random(seed)
    differing = rows = 0
    for trial in trials(10**9, seed, **shape):
        together = run(trial.step, form, trial.options)
        nodes = trial.step.batch.cu_nodes_host[1]
        for node in rng.sample(range(nodes), min(4, nodes)):
            alone = run(
                alone_step(trial.step, node, as_chain=rng.random() < 0.5), form, trial.options
            )[0]
            differing += not torch.equal(together[node], alone)
            rows += 1
            if rows == count:
                return differing, rows
    raise AssertionError("unreachable")
