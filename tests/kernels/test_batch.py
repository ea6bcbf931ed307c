"""TreeBatch: places, positions and the errors of contradictory lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_kernels import TreeBatch


def test_fields_of_a_mixed_batch() -> None:
    batch = TreeBatch.from_lists(
        [[-1, 0, 0, 2], 3, 0, [-1]], [5, 0, 9, 4], [[7, 2, 9], [4], [1, 8, 3], [6, 5]], 4
    )
    assert batch.cu_nodes.tolist() == batch.cu_nodes_host == [0, 4, 7, 7, 8]
    assert batch.num_rows == 8
    assert batch.num_requests == 4
    assert batch.block_tables_host == [[7, 2, 9], [4], [1, 8, 3], [6, 5]]
    assert batch.block_tables.tolist() == [[7, 2, 9], [4, 0, 0], [1, 8, 3], [6, 5, 0]]
    assert batch.depths.tolist() == [0, 1, 1, 2, 0, 1, 2, 0]
    assert batch.ancestors.tolist()[:4] == [[0b1], [0b11], [0b101], [0b1101]]
    assert batch.is_chain.tolist() == batch.is_chain_host == [False, True, True, False]
    assert batch.row_requests.tolist() == [0, 0, 0, 0, 1, 1, 1, 3]
    assert batch.positions.tolist() == [5, 6, 6, 7, 0, 1, 2, 4]
    # Rows lie at L + i in numbering order, whatever their depth.
    assert batch.slots.tolist() == [9, 10, 11, 36, 16, 17, 18, 20]
    dtypes = {name: getattr(batch, name).dtype for name in ("cu_nodes", "depths", "block_tables")}
    assert set(dtypes.values()) == {torch.int32}
    assert batch.ancestors.dtype == batch.slots.dtype == batch.positions.dtype == torch.int64


def test_reserved_pages_past_the_rows_are_dropped() -> None:
    batch = TreeBatch.from_lists([2, [-1]], [3, 4], [[1, 2, 3, 4], [5, 6]], 4)
    assert batch.block_tables_host == [[1, 2], [5, 6]]
    assert batch.block_tables.shape == (2, 2)


@pytest.mark.parametrize(("widest", "words"), [(64, 1), (65, 2), (129, 3), (256, 4)])
def test_words_fit_the_widest_tree(widest: int, words: int) -> None:
    chain = list(range(-1, widest - 1))
    batch = TreeBatch.from_lists([chain, 300], [0, 0], [[0, 1], [2, 3, 4]], 128)
    assert batch.ancestors.shape == (widest + 300, words)


def test_a_batch_of_nothing() -> None:
    batch = TreeBatch.from_lists([], [], [], 16)
    assert batch.num_rows == batch.num_requests == 0
    assert batch.slots.shape == batch.positions.shape == (0,)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_slots_for_every_page_size(page_size: int) -> None:
    table = list(range(200 // page_size + 2, 0, -1))
    batch = TreeBatch.from_lists([37], [150], [table], page_size)
    expected = [
        table[place // page_size] * page_size + place % page_size for place in range(150, 187)
    ]
    assert batch.slots.tolist() == expected


GOOD: dict[str, Any] = {
    "parents": [[-1, 0], 3],
    "committed_lens": [4, 2],
    "block_tables": [[0, 1], [2, 3]],
    "page_size": 4,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_size": 0}, "page_size: must be a power of two in 1..128, got 0"),
        ({"page_size": 12}, "page_size: must be a power of two"),
        ({"page_size": 256}, "page_size: must be a power of two"),
        ({"committed_lens": [4]}, "one entry per request, got 2, 1 and 2"),
        ({"block_tables": [[0, 1]]}, "one entry per request, got 2, 2 and 1"),
        ({"committed_lens": [4, -1]}, "request 1: committed_lens must be 0 or more, got -1"),
        ({"parents": [[-1, 0], -3]}, "request 1: a chain has 0 or more rows, got -3"),
        ({"parents": [3, [-1, 1]]}, "request 1, node 1: parent 1 is not an earlier node"),
        ({"block_tables": [[0, 1], [2]]}, "request 1: block table has 1 pages, .* need 2"),
        ({"block_tables": [[0, 1], [2, -5]]}, "request 1: block table holds a negative page id"),
    ],
)
def test_contradictory_lists_are_refused(changed: dict[str, Any], message: str) -> None:
    TreeBatch.from_lists(**GOOD)
    with pytest.raises(ValueError, match=message):
        TreeBatch.from_lists(**(GOOD | changed))
