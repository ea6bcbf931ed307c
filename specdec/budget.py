"""Which of the proposed nodes are scored: calibrated survival against measured cost.

The trees of the whole batch are cut from one best-first heap. A node's survival never exceeds its
parent's, so the M best nodes of the batch always form trees, and the best cut for every M is a
prefix of one list; the cut taken maximises expected emitted tokens per millisecond.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.step import Verdict
from specdec_drafts.tree import TokenTree

_PRIOR_WEIGHT = 8.0
_DECAY = 0.995
"""A bucket's counts fade with each of its updates: about the last 200 decide."""


class Calibration:
    """How often nodes of each bucket were accepted once their parent was.

    The drafter's own estimate counts as if it had been seen eight times.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}

    def reset(self) -> None:
        """Forget all outcomes."""
        self._counts.clear()

    def survival(self, tree: TokenTree) -> list[float]:
        """[N] probability that each node is accepted: the product along its path."""
        survival = [1.0] * tree.num_nodes
        for node in range(1, tree.num_nodes):
            seen, matched = self._counts.get(tree.buckets[node], (0.0, 0.0))
            estimate = (matched + _PRIOR_WEIGHT * tree.probs[node]) / (seen + _PRIOR_WEIGHT)
            survival[node] = survival[tree.parents[node]] * min(estimate, 0.999)
        return survival

    def observe(self, verdict: Verdict) -> None:
        """Count every node whose parent is on the path: it was accepted or it was not."""
        tree = verdict.tree
        chosen = dict(zip(verdict.path, verdict.emitted, strict=True))
        for node in range(1, tree.num_nodes):
            token = chosen.get(tree.parents[node])
            if token is None:
                continue
            key = tree.buckets[node]
            seen, matched = self._counts.get(key, (0.0, 0.0))
            hit = float(tree.token_ids[node] == token)
            self._counts[key] = (seen * _DECAY + 1.0, matched * _DECAY + hit)


class CostTable:
    """Milliseconds of a target pass by number of rows, measured at start-up, interpolated.

    Without measurements every pass costs the same, so that all nodes are worth scoring.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._milliseconds: list[float] = []

    def measure(self, run: Callable[[int], float], rows: Sequence[int]) -> None:
        """Fill the table with run(n) for n in rows (ascending); later rows never cost less."""
        self._rows = list(rows)
        self._milliseconds = []
        for count in rows:
            floor = self._milliseconds[-1] if self._milliseconds else 0.0
            self._milliseconds.append(max(floor, run(count)))

    def entries(self) -> dict[int, float]:
        """Rows to milliseconds, as measured."""
        return dict(zip(self._rows, self._milliseconds, strict=True))

    def cost(self, rows: int) -> float:
        """Milliseconds of a pass over `rows` rows; proportional beyond the table's end."""
        if not self._rows:
            return 1.0
        right = bisect.bisect_left(self._rows, rows)
        if right == len(self._rows):
            return self._milliseconds[-1] * rows / self._rows[-1]
        if right == 0 or self._rows[right] == rows:
            return self._milliseconds[right]
        low, high = self._rows[right - 1], self._rows[right]
        share = (rows - low) / (high - low)
        return self._milliseconds[right - 1] * (1 - share) + self._milliseconds[right] * share


@dataclass(slots=True)
class Candidate:
    """One request's proposed tree and its limits; `kept` is filled by cut().

    survival: [N] as Calibration gives it. by_cost: stop where cost says so, else at the limits.
    """

    tree: TokenTree
    survival: Sequence[float]
    max_nodes: int
    max_depth: int
    by_cost: bool
    kept: list[int] = field(default_factory=lambda: [0])


def _children(tree: TokenTree) -> Mapping[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node in range(1, tree.num_nodes):
        children.setdefault(tree.parents[node], []).append(node)
    return children


def _best_first(candidates: Sequence[Candidate], max_rows: int) -> list[tuple[float, int, int]]:
    """(survival, candidate, node) of the best nodes of all candidates, best first."""
    children = [_children(candidate.tree) for candidate in candidates]
    depths = [candidate.tree.depths() for candidate in candidates]
    left = [candidate.max_nodes for candidate in candidates]
    heap: list[tuple[float, int, int]] = []

    def push(index: int, parent: int) -> None:
        for node in children[index].get(parent, ()):
            if depths[index][node] <= candidates[index].max_depth:
                heapq.heappush(heap, (-candidates[index].survival[node], index, node))

    for index in range(len(candidates)):
        push(index, 0)
    chosen: list[tuple[float, int, int]] = []
    while heap and len(chosen) < max_rows:
        negative, index, node = heapq.heappop(heap)
        if left[index] == 0:
            continue
        left[index] -= 1
        chosen.append((-negative, index, node))
        push(index, node)
    return chosen


def cut(
    candidates: Sequence[Candidate],
    *,
    base_rows: int,
    num_judged: int,
    max_rows: int,
    costs: CostTable,
) -> None:
    """Choose the nodes to score. Mutates `kept` of every candidate (node indices, root first).

    base_rows: rows of the step before any drafted node. num_judged: requests of the step that emit
    a token in any case. max_rows: rows of the step at most.
    Candidates with by_cost = False take their best nodes up to their limits; the others share what
    is left for as long as expected tokens per millisecond grow.
    """
    fixed = [candidate for candidate in candidates if not candidate.by_cost]
    expected = float(num_judged)
    for survival, index, node in _best_first(fixed, max_rows - base_rows):
        fixed[index].kept.append(node)
        expected += survival
        base_rows += 1
    auto = [candidate for candidate in candidates if candidate.by_cost]
    chosen = _best_first(auto, max_rows - base_rows)
    best_rate, best_length = expected / costs.cost(base_rows), 0
    for length, (survival, _, _) in enumerate(chosen, start=1):
        expected += survival
        rate = expected / costs.cost(base_rows + length)
        if rate > best_rate:
            best_rate, best_length = rate, length
    for _, index, node in chosen[:best_length]:
        auto[index].kept.append(node)


def principal_first(tree: TokenTree, kept: Sequence[int], survival: Sequence[float]) -> list[int]:
    """`kept` reordered: root, then the most probable path, then the rest, parents first.

    A commit along the principal path moves no KV.
    """
    kept_set = set(kept)
    best: dict[int, int] = {}
    for node in sorted(kept_set - {0}):
        parent = tree.parents[node]
        if parent not in best or survival[node] > survival[best[parent]]:
            best[parent] = node
    principal = [0]
    while principal[-1] in best:
        principal.append(best[principal[-1]])
    return principal + sorted(kept_set.difference(principal))
