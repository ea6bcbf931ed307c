"""Trees keep their rules, and the builder merges siblings."""

from __future__ import annotations

import pytest

from specdec_drafts import TokenTree, TreeBuilder, root_only


def test_builder_merges_equal_siblings_and_keeps_the_larger_estimate() -> None:
    builder = TreeBuilder(5)
    first = builder.add(0, 7, 0.3, 1)
    again = builder.add(0, 7, 0.6, 2)
    deeper = builder.add(first, 7, 0.5, 3)
    assert (first, again, deeper, len(builder)) == (1, 1, 2, 3)
    tree = builder.build()
    assert (tree.probs[1], tree.buckets[1]) == (0.6, 2)
    assert tree.depths() == [0, 1, 2]
    assert (tree.num_nodes, tree.num_drafted) == (3, 2)
    tree.check(vocab_size=8)


def test_trees_of_one_root_merge_into_one() -> None:
    builder = TreeBuilder(9)
    builder.merge(TokenTree([9, 1, 2], [-1, 0, 1], [1, 0.5, 0.4], [0, 3, 4]))
    builder.merge(TokenTree([9, 5, 1, 7], [-1, 0, 0, 2], [1, 0.1, 0.7, 0.2], [0, 1, 2, 3]), 100)
    assert builder.build() == TokenTree(
        [9, 1, 2, 5, 7], [-1, 0, 1, 0, 1], [1.0, 0.7, 0.4, 0.1, 0.2], [0, 102, 4, 101, 103]
    )


def test_select_renumbers() -> None:
    tree = TokenTree([9, 1, 2, 3, 4], [-1, 0, 0, 2, 1], [1, 0.5, 0.4, 0.3, 0.2], [0, 1, 2, 3, 4])
    chosen = tree.select([0, 2, 3])
    assert chosen == TokenTree([9, 2, 3], [-1, 0, 1], [1, 0.4, 0.3], [0, 2, 3])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (TokenTree([], [], [], []), "root"),
        (TokenTree([1], [0], [1.0], [0]), "root"),
        (TokenTree([1, 2], [-1, 1], [1.0, 0.5], [0, 0]), "parent 1"),
        (TokenTree([1, 2, 2], [-1, 0, 0], [1.0, 0.5, 0.5], [0, 0, 0]), "sibling"),
        (TokenTree([1, 9], [-1, 0], [1.0, 0.5], [0, 0]), "token 9"),
        (TokenTree([1, 2], [-1, 0], [1.0, 0.0], [0, 0]), "probability"),
        (TokenTree([1, 2], [-1, 0], [1.0], [0, 0]), "one entry a node"),
    ],
)
def test_broken_trees_are_named(tree: TokenTree, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.check(vocab_size=5)


def test_root_only_is_plain_decoding() -> None:
    root_only(3).check()
    assert root_only(3).num_drafted == 0
