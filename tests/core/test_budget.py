"""The cut is the best one: against enumeration, under limits, and by cost."""

from __future__ import annotations

import itertools
import random

import pytest

from specdec.budget import Calibration, Candidate, CostTable, cut, principal_first
from specdec.step import Verdict
from specdec_drafts import TokenTree


def random_tree(rng: random.Random, num_nodes: int) -> TokenTree:
    parents = [-1] + [rng.randrange(node) for node in range(1, num_nodes)]
    tokens = list(range(num_nodes))
    return TokenTree(tokens, parents, [1.0] + [rng.uniform(0.05, 0.95) for _ in tokens[1:]],
                     [0] * num_nodes)  # fmt: skip


def candidate(
    tree: TokenTree, *, by_cost: bool, max_nodes: int = 99, max_depth: int = 99
) -> Candidate:
    return Candidate(tree, Calibration().survival(tree), max_nodes, max_depth, by_cost)


def is_closed(tree: TokenTree, kept: list[int]) -> bool:
    return 0 in kept and all(tree.parents[node] in kept for node in kept if node)


def best_by_enumeration(trees: list[Candidate], base: int, costs: CostTable) -> float:
    """Largest expected tokens per millisecond over all closed subtrees of all trees."""

    def options(one: Candidate) -> list[tuple[int, float]]:
        nodes = range(1, one.tree.num_nodes)
        sets = itertools.chain.from_iterable(
            itertools.combinations(nodes, count) for count in range(one.tree.num_nodes)
        )
        return [
            (len(kept), sum(one.survival[node] for node in kept))
            for kept in sets if is_closed(one.tree, [0, *kept])
        ]  # fmt: skip

    rates = []
    for combination in itertools.product(*(options(one) for one in trees)):
        rows = base + sum(count for count, _ in combination)
        rates.append((len(trees) + sum(gain for _, gain in combination)) / costs.cost(rows))
    return max(rates)


def cost_table(entries: dict[int, float]) -> CostTable:
    costs = CostTable()
    costs.measure(entries.__getitem__, list(entries))
    return costs


@pytest.mark.parametrize("seed", range(12))
def test_no_closed_choice_of_nodes_has_a_better_rate(seed: int) -> None:
    rng = random.Random(seed)
    trees = [candidate(random_tree(rng, 6), by_cost=True) for _ in range(2)]
    costs = cost_table({1: 1.0, 4: rng.uniform(1, 3), 16: rng.uniform(3, 9)})
    cut(trees, base_rows=2, num_judged=2, max_rows=100, costs=costs)
    assert all(is_closed(one.tree, one.kept) for one in trees)
    rows = 2 + sum(len(one.kept) - 1 for one in trees)
    expected = sum(sum(one.survival[node] for node in one.kept) for one in trees)
    assert expected / costs.cost(rows) == pytest.approx(best_by_enumeration(trees, 2, costs))


def test_dear_rows_mean_no_speculation() -> None:
    tree = random_tree(random.Random(0), 8)
    one = candidate(tree, by_cost=True)
    cut(
        [one],
        base_rows=1,
        num_judged=1,
        max_rows=100,
        costs=cost_table({1: 1.0, 2: 2.0, 4: 4.0, 64: 64.0}),
    )
    assert one.kept == [0]


def test_free_rows_mean_everything_within_the_limits() -> None:
    rng = random.Random(1)
    for by_cost in (True, False):
        one = candidate(random_tree(rng, 30), by_cost=by_cost, max_nodes=9, max_depth=3)
        cut([one], base_rows=1, num_judged=1, max_rows=100, costs=CostTable())
        depths = one.tree.depths()
        assert is_closed(one.tree, one.kept)
        assert len(one.kept) - 1 == min(9, sum(0 < depth <= 3 for depth in depths))
        assert max(depths[node] for node in one.kept) <= 3


def test_fixed_requests_take_their_nodes_whatever_they_cost() -> None:
    weak = TokenTree([0, 1, 2, 3], [-1, 0, 0, 0], [1.0, 0.3, 0.2, 0.1], [0] * 4)
    fixed = candidate(random_tree(random.Random(2), 10), by_cost=False, max_nodes=5)
    auto = candidate(weak, by_cost=True)
    cut(
        [auto, fixed],
        base_rows=2,
        num_judged=2,
        max_rows=100,
        costs=cost_table({1: 1.0, 100: 100.0}),
    )
    assert (len(fixed.kept), len(auto.kept)) == (6, 1)


def test_rows_of_the_step_are_never_exceeded() -> None:
    rng = random.Random(3)
    trees = [candidate(random_tree(rng, 20), by_cost=i % 2 == 0) for i in range(4)]
    cut(trees, base_rows=4, num_judged=4, max_rows=20, costs=CostTable())
    assert 4 + sum(len(one.kept) - 1 for one in trees) == 20


def test_the_principal_path_comes_first_and_parents_before_children() -> None:
    rng = random.Random(4)
    for _ in range(50):
        tree = random_tree(rng, 12)
        survival = Calibration().survival(tree)
        order = principal_first(tree, range(12), survival)
        assert sorted(order) == list(range(12))
        chosen = tree.select(order)
        chosen.check()
        node, depth = 0, 0
        while children := [c for c in range(1, 12) if chosen.parents[c] == node]:
            new_survival = [survival[i] for i in order]
            node, depth = max(children, key=lambda c: new_survival[c]), depth + 1
            assert node == depth


def test_calibration_learns_the_rate_of_a_bucket_and_forgets_on_reset() -> None:
    tree = TokenTree([0, 1, 2], [-1, 0, 0], [1.0, 0.9, 0.1], [0, 1, 2])
    calibration = Calibration()
    rng = random.Random(5)
    for _ in range(2000):
        chosen = 1 if rng.random() < 0.3 else 7
        path = [0, 1] if chosen == 1 else [0]
        emitted = [1, 9] if chosen == 1 else [7]
        calibration.observe(Verdict(tree, path, emitted))
    survival = calibration.survival(tree)
    assert survival[1] == pytest.approx(0.3, abs=0.1)
    assert survival[2] < 0.02
    calibration.reset()
    assert calibration.survival(tree)[1] == 0.9


def test_cost_is_interpolated_and_never_falls() -> None:
    costs = cost_table({1: 2.0, 2: 1.0, 4: 5.0})
    assert [costs.cost(rows) for rows in (1, 2, 3, 4, 8)] == [2.0, 2.0, 3.5, 5.0, 10.0]
