"""Acceptance rules by exact enumeration: what each emits, against the target's own law.

Every drafted tree, every accept decision and every bonus token is enumerated with its probability
(three tokens, depth up to two), so a rule is right to rounding or it is wrong.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
V = 3
"""Tokens of the vocabulary."""

Path = tuple[int, ...]
Tree = list[tuple[int, "Tree"]]
Law = Callable[[Path], Floats]
Emitted = dict[Path, float]
Rule = Callable[[Tree, Law, Law], Emitted]
Sampler = Callable[[Floats, int], Iterator[tuple[Path, float]]]


class RandomLaw:
    """A language model over V tokens: a fixed random law after every path."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._laws: dict[Path, Floats] = {}

    def __call__(self, path: Path) -> Floats:
        if path not in self._laws:
            self._laws[path] = self._rng.dirichlet(np.full(V, 0.8))
        return self._laws[path]


def joint_law(target: Law, length: int) -> Emitted:
    """The target's own law over paths of `length` tokens."""
    law = {}
    for path in itertools.product(range(V), repeat=length):
        law[path] = float(np.prod([target(path[:i])[path[i]] for i in range(length)]))
    return law


def extended(emitted: Emitted, target: Law, length: int) -> Emitted:
    """Continue every emitted path with the plain target until it has `length` tokens."""
    law: Emitted = defaultdict(float)
    for path, weight in emitted.items():
        for tail in itertools.product(range(V), repeat=max(0, length - len(path))):
            full, prob = path, weight
            for token in tail:
                prob *= target(full)[token]
                full += (token,)
            law[full[:length]] += prob
    return law


# How the drafted children of a node are chosen: (tokens in order, probability).


def without_replacement(q: Floats, count: int) -> Iterator[tuple[Path, float]]:
    """Drawn from q, each token at most once, in the order drawn."""
    for tokens in itertools.permutations(range(V), count):
        prob, rest = 1.0, q.copy()
        for token in tokens:
            prob *= rest[token] / rest.sum() if rest.sum() > 0 else 0.0
            rest[token] = 0.0
        if prob > 0:
            yield tokens, prob


def independent(q: Floats, count: int) -> Iterator[tuple[Path, float]]:
    """Drawn from q independently; a token may come twice."""
    for tokens in itertools.product(range(V), repeat=count):
        yield tokens, float(np.prod([q[token] for token in tokens]))


def most_probable(q: Floats, count: int) -> Iterator[tuple[Path, float]]:
    """The `count` most probable tokens of q: nothing is drawn."""
    yield tuple(np.argsort(-q, kind="stable")[:count].tolist()), 1.0


def keep_likelier_of_two(q: Floats, count: int) -> Iterator[tuple[Path, float]]:
    """BUG when used with a rejection rule: pruning that looks at the sampled values."""
    for (first, second), prob in without_replacement(q, 2):
        yield ((first,) if q[first] >= q[second] else (second,)), prob


def trees(
    draft: Law, shape: Sequence[int], sampler: Sampler, path: Path = ()
) -> Iterator[tuple[Tree, float]]:
    """Every tree of the shape (children a node, depth by depth) with its probability."""
    if not shape:
        yield [], 1.0
        return
    for tokens, prob in sampler(draft(path), shape[0]):
        subtrees = [list(trees(draft, shape[1:], sampler, (*path, token))) for token in tokens]
        for combination in itertools.product(*subtrees):
            weight = prob * float(np.prod([p for _, p in combination]))
            yield [(t, sub) for t, (sub, _) in zip(tokens, combination, strict=True)], weight


# The rules: (tree, target, draft) -> law over emitted paths.


def walk(tree: Tree, target: Law, draft: Law, path: Path = ()) -> Emitted:
    """Draw from the target; descend while a child carries the token."""
    emitted: Emitted = defaultdict(float)
    children = dict(tree)
    for token in range(V):
        prob, step = target(path)[token], (*path, token)
        if token in children:
            for out, inner in walk(children[token], target, draft, step).items():
                emitted[out] += prob * inner
        else:
            emitted[step] += prob
    return emitted


def _normalised(x: Floats) -> Floats:
    return x / x.sum() if x.sum() > 0 else x


def _without(law: Floats, token: int) -> Floats:
    return _normalised(np.where(np.arange(V) == token, 0.0, law))


def rejection(mode: str) -> Rule:
    """Recursive rejection over siblings (Leviathan et al. 2023; Jeong et al. 2024 for trees).

    mode: what the children are taken for: draws from q "without" replacement, "iid" draws, or a
    "point" mass each. A mode that is not how they were made is a bug, and shows as one.
    """

    def rule(tree: Tree, target: Law, draft: Law, path: Path = ()) -> Emitted:
        emitted: Emitted = defaultdict(float)
        p, q, weight = target(path).copy(), draft(path).copy(), 1.0
        for token, subtree in tree:
            if mode == "point":
                accept = p[token]
            else:
                accept = min(1.0, p[token] / q[token]) if q[token] > 0 else 0.0
            if accept > 0:
                for out, inner in rule(subtree, target, draft, (*path, token)).items():
                    emitted[out] += weight * accept * inner
            weight *= 1 - accept
            if weight <= 1e-15:
                return emitted
            p = _without(p, token) if mode == "point" else _normalised(np.maximum(p - q, 0.0))
            if mode == "without":
                q = _without(q, token)
        for token in range(V):
            emitted[(*path, token)] += weight * p[token]
        return emitted

    return rule


def block(tree: Tree, target: Law, draft: Law) -> Emitted:
    """Block verification of one chain (Sun et al. 2024)."""
    tokens: Path = ()
    rhos, node = [1.0], tree
    while node:
        token, subtree = node[0]
        rhos.append(min(rhos[-1] * target(tokens)[token] / draft(tokens)[token], 1.0))
        tokens, node = (*tokens, token), subtree
    accept = []
    for i in range(1, len(tokens) + 1):
        if i == len(tokens):
            accept.append(rhos[i])
        else:
            left = np.maximum(rhos[i] * target(tokens[:i]) - draft(tokens[:i]), 0.0).sum()
            accept.append(left / (left + 1 - rhos[i]) if left + 1 - rhos[i] > 0 else 0.0)
    emitted: Emitted = defaultdict(float)
    for taken in range(len(tokens), -1, -1):
        prob = accept[taken - 1] if taken else 1.0
        prob *= float(np.prod([1 - a for a in accept[taken:]]))
        prefix = tokens[:taken]
        law = target(prefix)
        if taken < len(tokens):
            law = _normalised(np.maximum(rhos[taken] * law - draft(prefix), 0.0))
        for token in range(V):
            emitted[(*prefix, token)] += prob * law[token]
    return emitted


@dataclass
class _Node:
    path: Path
    parent: int
    children: list[tuple[int, int]]  # (token, node), in the order they are tried
    p: Floats
    q: Floats
    rho: float = 1.0


def traversal(mode: str) -> Rule:
    """Leaf-to-root traversal verification (Weng et al. 2025); modes as in `rejection`."""

    def refresh(nodes: list[_Node], index: int) -> None:
        node = nodes[index]
        for token, child in node.children:
            q = 1.0 if mode == "point" else float(node.q[token])
            nodes[child].rho = min(node.rho * float(node.p[token]) / q, 1.0) if q > 0 else 1.0
            refresh(nodes, child)

    def judge(nodes: list[_Node], weight: float, emitted: Emitted) -> None:
        if weight < 1e-15:
            return
        index = 0
        while nodes[index].children:
            index = nodes[index].children[0][1]
        leaf = nodes[index]
        accept = 1.0 if index == 0 else leaf.rho
        for token in range(V):
            emitted[(*leaf.path, token)] += weight * accept * float(leaf.p[token])
        if accept >= 1.0:
            return
        rest = copy.deepcopy(nodes)
        parent, token = rest[leaf.parent], leaf.path[-1]
        q = np.eye(V)[token] if mode == "point" else parent.q
        residual = np.maximum(parent.rho * parent.p - q, 0.0)
        left = float(residual.sum())
        below = left + 1 - parent.rho
        parent.rho = left / below if below > 0 else 0.0
        if left > 0:
            parent.p = residual / left
        if mode == "without":
            parent.q = _without(parent.q, token)
        parent.children = parent.children[1:]
        refresh(rest, leaf.parent)
        judge(rest, weight * (1 - accept), emitted)

    def rule(tree: Tree, target: Law, draft: Law) -> Emitted:
        nodes: list[_Node] = []

        def build(subtree: Tree, parent: int, path: Path) -> int:
            index = len(nodes)
            nodes.append(_Node(path, parent, [], target(path).copy(), draft(path).copy()))
            for token, below in subtree:
                nodes[index].children.append((token, build(below, index, (*path, token))))
            return index

        emitted: Emitted = defaultdict(float)
        build(tree, -1, ())
        refresh(nodes, 0)
        judge(nodes, 1.0, emitted)
        return emitted

    return rule


def worst_error(shape: Sequence[int], sampler: Sampler, rule: Rule) -> float:
    """Largest difference from the joint law over three random pairs of target and draft."""
    rng = np.random.default_rng(7)
    worst = 0.0
    for _ in range(3):
        target, draft = RandomLaw(rng), RandomLaw(rng)
        length = len(shape) + 1
        emitted: Emitted = defaultdict(float)
        for tree, weight in trees(draft, shape, sampler):
            for path, prob in rule(tree, target, draft).items():
                emitted[path] += weight * prob
        law, wanted = extended(emitted, target, length), joint_law(target, length)
        worst = max(worst, *(abs(law[path] - wanted[path]) for path in wanted))
    return worst
