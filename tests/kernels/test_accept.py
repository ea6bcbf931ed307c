"""The walk: by hand, on chains and odd trees, and what is refused."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch

from specdec_kernels import TreeBatch, accept
from tests.kernels.accept_cases import Step, make_step, random_step

#   0 -> 1 -> 3 -> 5
#   |    `--> 4
#   `--> 2
TREE = [-1, 0, 0, 1, 1, 3]
TOKENS = [90, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("chosen", "path"),
    [
        ([7, 13, 13, 15, 15, 15], [0]),
        ([12, 13, 14, 15, 15, 15], [0, 2]),
        ([11, 14, 14, 15, 15, 15], [0, 1, 4]),
        ([11, 13, 0, 15, 0, 99], [0, 1, 3, 5]),
        ([12, 13, 11, 15, 0, 99], [0, 2]),  # 1, 3 and 5 carry tokens that match, but not 1's parent
        ([-1, 13, 0, 15, 0, 99], [0]),
        ([11, -1, 0, 15, 0, 99], [0, 1]),
    ],
)
def test_paths_by_hand(chosen: list[int], path: list[int]) -> None:
    result = accept(*make_step([TREE], TOKENS, chosen), max_depth=4)
    missing = [-1] * (5 - len(path))
    assert result.num_accepted.tolist() == [len(path) - 1]
    assert result.path.tolist() == [path + missing]
    assert result.emitted.tolist() == [[chosen[node] for node in path] + missing]


def test_requests_keep_apart_and_empty_ones_emit_nothing() -> None:
    step = make_step([TREE, 0, [-1], 3], [*TOKENS, 5, 1, 2, 3], [11, 0, 0, 0, 0, 0, 6, 2, 3, 4])
    result = accept(*step, max_depth=2)
    assert result.num_accepted.tolist() == [1, 0, 0, 2]
    assert result.path.tolist() == [[0, 1, -1], [-1, -1, -1], [0, -1, -1], [0, 1, 2]]
    assert result.emitted.tolist() == [[11, 0, -1], [-1, -1, -1], [6, -1, -1], [2, 3, 4]]


def test_deeper_nodes_are_passed_over() -> None:
    step = make_step([TREE], TOKENS, [11, 13, 0, 15, 0, 99])
    for max_depth in range(4):
        result = accept(*step, max_depth=max_depth)
        assert result.path.tolist() == [[0, 1, 3, 5][: max_depth + 1]]
        assert result.emitted.tolist() == [[11, 13, 15, 99][: max_depth + 1]]


def test_longest_chain_and_longest_tree() -> None:
    tokens = list(range(256))
    tree = list(range(-1, 255))
    for parents in (256, tree):
        result = accept(*make_step([parents], tokens, [*tokens[1:], 999]), max_depth=255)
        assert result.path.tolist() == [tokens]
        assert result.emitted.tolist() == [[*tokens[1:], 999]]


def test_every_path_is_one_that_the_law_takes() -> None:
    """From the outputs alone, without walking: each node carries what its parent's row chose."""
    step = random_step(3, 300)
    result = accept(*step, max_depth=255)
    starts = step.batch.cu_nodes_host
    for request, count in enumerate(result.num_accepted.tolist()):
        start, end = starts[request : request + 2]
        parents = step.batch.parents[start:end].tolist()
        tokens, chosen = step.token_ids[start:end].tolist(), step.chosen[start:end].tolist()
        path = result.path[request].tolist()
        assert path[count + 1 :] == [-1] * (255 - count)
        if start == end:
            continue
        for above, node in pairwise(path[: count + 1]):
            assert parents[node] == above
            assert tokens[node] == chosen[above]
        last = path[count]
        ends = [n for n, parent in enumerate(parents) if parent == last]
        assert all(tokens[node] != chosen[last] for node in ends)
        assert result.emitted[request, : count + 1].tolist() == [
            chosen[n] for n in path[: count + 1]
        ]


def refused(step: Step, match: str, **changed: Any) -> None:
    arguments = {**step._asdict(), "max_depth": 3, **changed}
    with pytest.raises(ValueError, match=match):
        accept(**arguments)


def test_bad_arguments_are_named() -> None:
    step = random_step(0, 5)
    rows = step.batch.num_rows
    refused(step, "token_ids: must be int64", token_ids=step.token_ids.int())
    refused(step, "chosen: must be int64", chosen=step.chosen[1:])
    refused(step, "chosen: must be contiguous", chosen=torch.zeros(2 * rows).long()[::2])
    refused(step, "token_ids: must be on the batch's", token_ids=step.token_ids.to("meta"))
    refused(step, r"max_depth: must lie in 0\.\.255", max_depth=256)
    refused(step, r"max_depth: must lie in 0\.\.255", max_depth=-1)
    refused(step, 'accept has no form "cpu"', impl="cpu")


def test_bad_batches_are_named() -> None:
    chain = TreeBatch.from_lists([257], [0], [[0, 1, 2]], 128)
    zeros = torch.zeros(257, dtype=torch.int64)
    refused(Step(chain, zeros, zeros), "batch: request 0 has 257 rows")
    step = random_step(0, 5)
    for name, tensor in (
        ("parents", step.batch.parents.long()),
        ("depths", step.batch.depths[1:]),
        ("ancestors", step.batch.ancestors.int()),
        ("cu_nodes", step.batch.cu_nodes.long()),
        ("is_chain", step.batch.is_chain.int()),
    ):
        broken = dataclasses.replace(step.batch, **{name: tensor})
        refused(step, f"batch.{name}: must be", batch=broken)
    elsewhere = dataclasses.replace(step.batch, parents=step.batch.parents.to("meta"))
    refused(step, "batch.parents: must be", batch=elsewhere)
    words = torch.zeros(step.batch.num_rows, 5, dtype=torch.int64)
    refused(step, r"1\.\.4 words", batch=dataclasses.replace(step.batch, ancestors=words))
