"""The scripted drafters guess as well or as badly as they claim, in trees that obey the rules."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.testing import (
    DRAFT_KINDS,
    NoisyDrafter,
    OracleDrafter,
    RandomDrafter,
    ScriptedDrafter,
    SelfDrafter,
    draft_of_kind,
    greedy_continuation,
    tiny_llama,
)
from specdec_drafts.base import Drafter, DraftRequest, Observation
from specdec_drafts.tree import TokenTree

MODEL: Any = tiny_llama()
ANSWER = greedy_continuation(MODEL, [9, 8, 7], 40)[3:]


def request_at(num_output: int, *, seed: int = 0, temperature: float = 0.0) -> DraftRequest:
    return DraftRequest("r", [9, 8, 7, *ANSWER[:num_output]], 3, 32, 16, temperature, seed)


def longest_right_path(tree: TokenTree, num_output: int) -> int:
    """How many drafted nodes the greedy answer would accept."""
    children = {(tree.parents[n], tree.token_ids[n]): n for n in range(1, tree.num_nodes)}
    node = length = 0
    while (child := children.get((node, ANSWER[num_output + length]))) is not None:
        node, length = child, length + 1
    return length


ALL = [
    ScriptedDrafter([[1, 2], [1, 3], [4]]),
    RandomDrafter(512),
    RandomDrafter(3, (3, 2)),
    OracleDrafter({(9, 8, 7): ANSWER}, 512, (4, 4)),
    OracleDrafter({(9, 8, 7): ANSWER}, 512, 5, accuracy=0.5),
    SelfDrafter(MODEL, (3, 2, 2)),
    NoisyDrafter(MODEL, 4),
]


@pytest.mark.parametrize("drafter", ALL, ids=lambda drafter: drafter.name)
def test_trees_obey_the_rules_and_repeat(drafter: Any) -> None:
    assert isinstance(drafter, Drafter)
    for num_output in range(12):
        request = request_at(num_output)
        (tree,) = drafter.propose([request])
        tree.check(vocab_size=512)
        assert tree.token_ids[0] == request.token_ids[-1]
        assert drafter.propose([request]) == [tree]


@pytest.mark.parametrize("shape", [5, (4, 4), (3, 2, 2)])
@pytest.mark.parametrize("make", [
    lambda shape: SelfDrafter(MODEL, shape),
    lambda shape: OracleDrafter({(9, 8, 7): ANSWER}, 512, shape),
], ids=["self", "oracle"])  # fmt: skip
def test_self_is_right_to_the_last_depth(make: Any, shape: Any) -> None:
    drafter = make(shape)
    depth = shape if isinstance(shape, int) else len(shape)
    for num_output in (0, 1, 7, 20):
        tree = drafter.tree(request_at(num_output))
        assert longest_right_path(tree, num_output) == depth


def test_the_right_child_is_not_always_the_likeliest() -> None:
    """Else the accepted path would be the principal one, and compaction would never move a page."""
    drafter = OracleDrafter({(9, 8, 7): ANSWER}, 512, (3,))
    places = []
    for num_output in range(30):
        tree = drafter.tree(request_at(num_output))
        best = max(range(1, 4), key=lambda node, tree=tree: tree.probs[node])  # type: ignore[misc]
        places.append(tree.token_ids[best] == ANSWER[num_output])
    assert 3 < sum(places) < 20


def test_noisy_is_right_about_half_the_time() -> None:
    drafter = NoisyDrafter(MODEL, 1)
    hits = sum(longest_right_path(drafter.tree(request_at(n)), n) for n in range(38))
    assert 10 < hits < 28


def test_self_extends_what_it_knows_and_follows_a_turn() -> None:
    drafter = SelfDrafter(MODEL, 3)
    drafter.tree(request_at(0))
    assert longest_right_path(drafter.tree(request_at(2)), 2) == 3
    turned = DraftRequest("r", [9, 8, 7, 1, 2], 3, 32, 16, 0.0, 0)
    expected = greedy_continuation(MODEL, turned.token_ids, 3)[5:]
    assert list(drafter.tree(turned).token_ids[1:]) == expected
    drafter.release("r")
    drafter.release("unknown")


def test_self_stops_at_the_end_of_its_context() -> None:
    model: Any = tiny_llama(max_positions=16)
    request = DraftRequest("r", list(range(15)), 15, 32, 16, 0.0, 0)
    assert SelfDrafter(model, 5).tree(request).num_drafted == 1


def test_oracle_is_silent_off_its_answer_and_knows_seeds() -> None:
    drafter = OracleDrafter({(4, (9, 8, 7)): ANSWER}, 512, 3)
    assert drafter.tree(request_at(2, seed=5)).num_drafted == 0
    assert longest_right_path(drafter.tree(request_at(2, seed=4)), 2) == 3
    turned = DraftRequest("r", [9, 8, 7, (ANSWER[0] + 1) % 512], 3, 32, 16, 0.0, 4)
    assert drafter.tree(turned).num_drafted == 0


def test_random_trees_differ_by_seed_when_sampling() -> None:
    drafter = RandomDrafter(512, 4)
    sampled = [drafter.tree(request_at(2, seed=s, temperature=1.0)).token_ids for s in range(5)]
    assert len({tuple(tokens) for tokens in sampled}) == 5
    greedy = [drafter.tree(request_at(2, seed=s)).token_ids for s in range(5)]
    assert len({tuple(tokens) for tokens in greedy}) == 1


def test_observations_are_kept_until_reset() -> None:
    drafter = RandomDrafter(512)
    record = Observation("r", drafter.tree(request_at(1)), [], [3])
    drafter.observe([record])
    assert drafter.observations == [record]
    drafter.reset()
    assert drafter.observations == []


def test_kinds_can_all_be_made() -> None:
    for kind in DRAFT_KINDS:
        assert draft_of_kind(kind, MODEL, {}) is not None
    with pytest.raises(ValueError, match="no such kind"):
        draft_of_kind("eagle", MODEL)
