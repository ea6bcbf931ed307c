"""Depths, ancestor sets and the errors of malformed trees."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import layout_trees
from specdec_kernels.testing import random_tree
from specdec_kernels.tree_layout import principal_path_length, tree_layout
from tests.kernels import layout_cases as cases


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


@pytest.mark.parametrize(("sizes", "page_size", "num_words"), cases.BATCHES)
def test_device_layouts_follow_the_parents(
    sizes: list[int], page_size: int, num_words: int
) -> None:
    cases.check(sizes, page_size, num_words, "auto")


@pytest.mark.parametrize("seed", range(10))
def test_device_layouts_of_random_batches(seed: int) -> None:
    cases.check(*cases.random_batch(seed), impl="auto", seed=seed)


def test_device_layouts_of_nothing() -> None:
    cases.check_nothing("auto")


@pytest.mark.parametrize(("bad", "num_words"), cases.MALFORMED)
def test_device_layouts_of_malformed_trees_raise_on_the_cpu(bad: list[int], num_words: int) -> None:
    with pytest.raises(ValueError, match=r"request 1.* (node|words)"):
        cases.check_malformed(bad, num_words, "auto")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parents": torch.tensor([-1, 0, -1])}, "parents: must be torch.int32"),
        ({"parents": int32(-1, 0, -1).view(3, 1)}, r"parents: must be torch.int32 \[3\]"),
        ({"cu_nodes": int32(0, 2)}, r"cu_nodes: must be torch.int32 \[3\]"),
        ({"cu_nodes": int32(0, 2, 4)}, "cu_nodes: must rise from 0 to 3"),
        ({"cu_nodes": int32(0, 4, 3)}, "cu_nodes: must rise from 0 to 3"),
        ({"committed_lens": torch.tensor([4, 5])}, "committed_lens: must be torch.int32"),
        ({"committed_lens": int32(4, -5)}, "request 1: committed_lens must be 0 or more"),
        ({"block_tables": int32(1, 2)}, r"block_tables: must be torch.int32 \[2, 2\]"),
        ({"block_tables": int32(1, 2).view(2, 1)}, "request 0: block table has 1 pages"),
        ({"block_tables": int32(1, 2, 3, 4).view(2, 2).T}, "block_tables: must be contiguous"),
        ({"parents": int32(-1, 0, -1).to("meta")}, "must be contiguous and on the device of"),
        ({"is_chain": int32(0, 1)}, "is_chain: must be torch.bool"),
        ({"page_size": 3}, "page_size: must be a power of two, got 3"),
        ({"num_words": 5}, "num_words: must lie in 1..4, got 5"),
        ({"num_lanes": 0}, "num_lanes: must be at least 1, got 0"),
        ({"impl": "cpu"}, 'layout_trees has no form "cpu"'),
    ],
)
def test_device_layouts_refuse(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "parents": int32(-1, 0, -1),
        "cu_nodes": int32(0, 2, 3),
        "committed_lens": int32(4, 5),
        "block_tables": int32(1, 2, 3, 4).view(2, 2),
        "page_size": 4,
        "num_words": 1,
    }
    layout_trees(**arguments)
    with pytest.raises(ValueError, match=message):
        layout_trees(**(arguments | changed))
