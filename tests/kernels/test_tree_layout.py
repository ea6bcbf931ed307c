"""Depths, ancestor sets and the errors of malformed trees."""

from __future__ import annotations

import random

import pytest

from specdec_kernels.testing import random_tree
from specdec_kernels.tree_layout import principal_path_length, tree_layout


def path_to_root(parents: list[int], node: int) -> set[int]:
    path = set()
    while node >= 0:
        path.add(node)
        node = parents[node]
    return path


@pytest.mark.parametrize("num_nodes", [1, 2, 17, 64, 65, 200, 256])
def test_layout_follows_the_parents(num_nodes: int) -> None:
    parents = random_tree(random.Random(num_nodes), num_nodes)
    layout = tree_layout(parents)
    for node in range(num_nodes):
        path = path_to_root(parents, node)
        assert layout.depths[node] == len(path) - 1
        assert {n for n in range(num_nodes) if layout.ancestor_bits[node] >> n & 1} == path


def test_words_are_the_bits_in_signed_64_bit_pieces() -> None:
    parents = list(range(-1, 255))
    layout = tree_layout(parents)
    words = layout.ancestor_words(4)
    assert words[63] == [-1, 0, 0, 0]
    assert words[64] == [-1, 1, 0, 0]
    assert words[255] == [-1, -1, -1, -1]
    for bits, row in zip(layout.ancestor_bits, words, strict=True):
        assert sum((word % (1 << 64)) << (64 * i) for i, word in enumerate(row)) == bits


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "request 7: a tree has 1 to 256 nodes, got 0"),
        ([-1] + [0] * 256, "request 7: a tree has 1 to 256 nodes, got 257"),
        ([0], "request 7, node 0: the root's parent is -1, got 0"),
        ([-1, 1], "request 7, node 1: parent 1 is not an earlier node"),
        ([-1, 0, 3, 0], "request 7, node 2: parent 3 is not an earlier node"),
        ([-1, 0, -1], "request 7, node 2: parent -1 is not an earlier node"),
        ([-1, 0, 99], "request 7, node 2: parent 99 is not an earlier node"),
    ],
)
def test_malformed_trees_are_refused_by_request_and_node(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_layout(parents, request=7)


@pytest.mark.parametrize(
    ("parents", "length"),
    [([-1], 1), ([-1, 0, 1, 0, 3], 3), ([-1, 0, 0, 2], 2), (list(range(-1, 9)), 10)],
)
def test_principal_path_length(parents: list[int], length: int) -> None:
    assert principal_path_length(parents) == length
    tree_layout(parents, principal_first=True)


def test_a_principal_path_that_goes_on_elsewhere_is_refused() -> None:
    breadth_first = [-1, 0, 0, 1]
    tree_layout(breadth_first)
    with pytest.raises(ValueError, match="request 2, node 3: it continues the principal path"):
        tree_layout(breadth_first, request=2, principal_first=True)
