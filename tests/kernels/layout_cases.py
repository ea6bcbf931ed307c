"""Batches for the tests of layout_trees, in any form, and a walk over parents as the oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import DeviceLayout, layout_trees
from specdec_kernels.testing import random_tree
from tests.kernels.kv_cases import place

LANES = 5

BATCHES = [
    ([1], 4, 1),
    ([5, -3, 1, 0, 64], 1, 1),
    ([64, 30], 64, 1),
    ([65, 128, -200, 3], 16, 2),
    ([129, -1, 17], 2, 3),
    ([256, 200], 128, 4),
    ([3, 4], 8, 4),
]
"""Rows per request, page size and ancestor words; -n is a chain of n rows, 0 no rows at all."""

MALFORMED = [
    pytest.param([0], 1, id="root"),
    pytest.param([-1, 1], 1, id="own-parent"),
    pytest.param([-1, 0, 3, 2], 1, id="cycle"),
    pytest.param([-1, 0, -1], 1, id="two-roots"),
    pytest.param([-1, 0, 2**31 - 1], 1, id="far"),
    pytest.param([-1, -(2**31)], 1, id="negative"),
    pytest.param([-1] + [0] * 64, 1, id="too-many-nodes"),
    pytest.param([-1] + [0] * 192, 3, id="too-many-for-three-words"),
    pytest.param([-1] + [0] * 300, 4, id="more-than-a-block"),
]


class Batch:
    """Trees of the given sizes after random lengths, as tensors for layout_trees."""

    def __init__(self, sizes: list[int], page_size: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.page_size = page_size
        self.is_chain = [n <= 0 for n in sizes]
        # Some are chains with a few branches: deep, and with a long principal path.
        self.trees = [
            list(range(-1, n - 1))
            if n > 0 and rng.random() < 0.4
            else random_tree(rng, abs(n))
            if n
            else []
            for n in sizes
        ]
        for tree in self.trees:
            for _ in range(len(tree) // 8):
                node = rng.randrange(1, len(tree))
                tree[node] = rng.randrange(node)
        self.lengths = [rng.randrange(3 * page_size) for _ in sizes]
        pages = list(range(2000))
        rng.shuffle(pages)
        needed = [
            -(-(length + len(tree)) // page_size)
            for length, tree in zip(self.lengths, self.trees, strict=True)
        ]
        self.tables = [[pages.pop() for _ in range(n)] for n in needed]

    def arguments(self) -> dict[str, Tensor]:
        """The tensors; a chain's parents are rubbish, as nobody may read them."""
        ends = [0]
        parents: list[int] = []
        for tree, chain in zip(self.trees, self.is_chain, strict=True):
            parents += [7] * len(tree) if chain else tree
            ends.append(len(parents))
        width = max((len(table) for table in self.tables), default=0) + 1
        tables = [table + [0] * (width - len(table)) for table in self.tables]
        return {
            "parents": torch.tensor(parents, dtype=torch.int32),
            "cu_nodes": torch.tensor(ends, dtype=torch.int32),
            "committed_lens": torch.tensor(self.lengths, dtype=torch.int32),
            "block_tables": torch.tensor(tables, dtype=torch.int32).view(len(tables), width),
        }

    def rows(
        self, request: int, num_words: int
    ) -> list[tuple[int, list[int], int, int, list[int]]]:
        """Depth, ancestor words, position, slot and lane slots of a request's rows, by walking."""
        found = []
        table, length = self.tables[request], self.lengths[request]
        chain, tree = self.is_chain[request], self.trees[request]
        for node in range(len(tree)):
            path = [node]
            while path[-1] > 0:
                path.append(path[-1] - 1 if chain else tree[path[-1]])
            bits = 0 if chain else sum(1 << ancestor for ancestor in path)
            words = [(bits >> 64 * word) & (2**64 - 1) for word in range(num_words)]
            seen = [length + ancestor for ancestor in path] + list(range(length))[::-1]
            lanes = [place(table, slot, self.page_size) for slot in seen[:LANES]]
            found.append(
                (
                    len(path) - 1,
                    [word - (1 << 64) if word >> 63 else word for word in words],
                    length + len(path) - 1,
                    place(table, length + node, self.page_size),
                    lanes + [-1] * (LANES - len(lanes)),
                )
            )
        return found

    def private_nodes(self, request: int) -> int:
        """The most nodes of a path that stand elsewhere than at their depth."""
        if self.is_chain[request]:
            return 0
        tree, most = self.trees[request], 0
        for node in range(len(tree)):
            path = [node]
            while tree[path[-1]] >= 0:
                path.append(tree[path[-1]])
            most = max(most, sum(a != depth for depth, a in enumerate(reversed(path))))
        return most


def random_batch(seed: int) -> tuple[list[int], int, int]:
    """Sizes, page size and words, drawn by seed."""
    rng = random.Random(seed)
    words = rng.randrange(1, 5)
    sizes = [rng.choice([rng.randrange(1, 64 * words + 1), -rng.randrange(400)]) for _ in range(5)]
    return sizes, 1 << rng.randrange(8), words


def assert_rows(layout: DeviceLayout, wanted: list[Any], first: int = 0) -> None:
    """Rows of a layout, from row `first` on, are the wanted ones."""
    for row, (depth, words, position, slot, lanes) in enumerate(wanted, first):
        assert layout.depths[row] == depth
        assert layout.ancestors[row].tolist() == words
        assert layout.positions[row] == position
        assert layout.slots[row] == slot
        assert layout.lane_slots[row].tolist() == lanes


def check(sizes: list[int], page_size: int, num_words: int, impl: Any, seed: int = 0) -> None:
    """Every field of every row equals what a walk over the parents finds."""
    batch = Batch(sizes, page_size, seed)
    chains = torch.tensor(batch.is_chain) if any(batch.is_chain) else None
    layout = layout_trees(
        **batch.arguments(), page_size=page_size, num_words=num_words, num_lanes=LANES,
        is_chain=chains, impl=impl,
    )  # fmt: skip
    assert [field.dtype for field in layout] == [
        torch.int32, torch.int64, torch.int64, torch.int64, torch.int32, torch.int32
    ]  # fmt: skip
    requests = range(len(sizes))
    wanted = [row for request in requests for row in batch.rows(request, num_words)]
    assert layout.depths.shape == (len(wanted),)
    assert_rows(layout, wanted)
    assert layout.private_nodes.tolist() == [batch.private_nodes(r) for r in requests]


def check_nothing(impl: Any) -> None:
    """No requests, and requests without rows."""
    for sizes in ([], [0, 0]):
        check(sizes, 4, 1, impl)


def check_malformed(bad: list[int], num_words: int, impl: Any) -> None:
    """A malformed tree among good ones is reported, stays in bounds and harms no other request."""
    batch = Batch([9, len(bad), 5], 4)
    good = batch.rows(0, num_words), batch.rows(2, num_words)
    batch.trees[1] = bad
    layout = layout_trees(
        **batch.arguments(), page_size=4, num_words=num_words, num_lanes=LANES, impl=impl
    )
    assert layout.private_nodes.tolist() == [batch.private_nodes(0), -1, batch.private_nodes(2)]
    assert_rows(layout, good[0])
    assert_rows(layout, good[1], 9 + len(bad))
    table, length = batch.tables[1], batch.lengths[1]
    alone = []
    for node in range(len(bad)):
        words = [0] * num_words
        if node < 64 * num_words:
            words[node // 64] = 1 << node % 64 if node % 64 < 63 else -(1 << 63)
        seen = [length + node, *range(length - 1, -1, -1)][:LANES]
        lanes = [place(table, slot, 4) for slot in seen]
        slot = place(table, length + node, 4)
        alone.append((0, words, length, slot, lanes + [-1] * (LANES - len(lanes))))
    assert_rows(layout, alone, 9)
