"""Prompt lookup: what it finds, in which order, and that it is incremental."""

from __future__ import annotations

import random

import pytest

from specdec_drafts import Drafter, DraftRequest, available_drafters, make_drafters
from specdec_drafts.ngram import NgramDrafter


def request(tokens: list[int], name: str = "r", nodes: int = 15, depth: int = 15) -> DraftRequest:
    return DraftRequest(name, tokens, 1, nodes, depth, 0.0, 0)


def paths(tokens: list[int], **limits: int) -> set[tuple[int, ...]]:
    """All root-to-node token paths of the proposed tree."""
    (tree,) = NgramDrafter().propose([request(tokens, **limits)])
    tree.check()
    assert tree.token_ids[0] == tokens[-1]
    found: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        found.append((*found[tree.parents[node]], tree.token_ids[node]))
    return set(found[1:])


def test_the_continuation_of_an_earlier_occurrence_is_proposed() -> None:
    assert (3, 4, 5) in paths([1, 2, 3, 4, 5, 9, 1, 2])


def test_different_continuations_share_one_tree() -> None:
    found = paths([1, 2, 3, 4, 1, 2, 3, 5, 1, 2])
    assert {(3,), (3, 4), (3, 5)} <= found


def test_the_longest_match_is_the_most_probable_child() -> None:
    tokens = [7, 1, 2, 50, 0, 8, 2, 60, 0, 7, 1, 2]
    (tree,) = NgramDrafter().propose([request(tokens)])
    children = {tree.token_ids[n]: tree.probs[n] for n in range(1, tree.num_nodes)
                if tree.parents[n] == 0}  # fmt: skip
    assert children[50] > children[60]


def test_nothing_known_is_no_guess() -> None:
    assert paths([1, 2, 3, 4]) == set()
    assert paths([1]) == set()


def test_depth_is_limited() -> None:
    assert max(map(len, paths([1, 2, 3, 4, 5, 6, 7, 1], depth=3))) == 3


def test_a_repeated_token_continues_itself() -> None:
    assert (4, 4) in paths([4, 4, 4, 4])


def test_proposals_do_not_depend_on_how_the_tokens_arrived() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(6) for _ in range(300)]
    growing = NgramDrafter()
    length = 5
    while length < 300:
        (grown,) = growing.propose([request(tokens[:length])])
        (fresh,) = NgramDrafter().propose([request(tokens[:length])])
        assert grown == fresh
        length += rng.randrange(1, 9)


def test_requests_are_apart_and_release_forgets() -> None:
    drafter = NgramDrafter()
    drafter.propose([request([1, 2, 3, 1], "a")])
    (other,) = drafter.propose([request([9, 1], "b")])
    assert other.num_drafted == 0
    drafter.release("a")
    drafter.release("unknown")
    (after,) = drafter.propose([request([7, 1], "a")])
    assert after.num_drafted == 0


def test_registry_makes_what_is_asked_for() -> None:
    assert set(available_drafters()) == {"none", "ngram"}
    assert [drafter.name for drafter in make_drafters(["none", "ngram"])] == ["none", "ngram"]
    assert make_drafters(None)[0].name == "none"
    own = NgramDrafter()
    assert isinstance(own, Drafter)
    assert make_drafters(own) == [own]
    with pytest.raises(ValueError, match="unknown drafter 'eagle'; known are none, ngram"):
        make_drafters("eagle")
    with pytest.raises(ValueError, match="name of its own"):
        make_drafters(["ngram", own])
