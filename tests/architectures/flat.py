"""Flat batches of several requests with trees, compared row by row with the stock module."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.runner import TargetRunner, flat_batch
from specdec_kernels import TreeBatch
from tests.architectures.building import stock_logits

_PAGE_SIZE = 4


def worst_row(
    model: PreTrainedModel,
    lengths: Sequence[int] = (30, 45, 3, 1),
    num_nodes: int = 10,
    attention: Any = "auto",
    seed: int = 0,
) -> float:
    """Largest relative error of a row's logits in one batch of requests of these lengths.

    Two passes: the first half of the first request and all of the others but their last token,
    then the first's second half, and a random tree for each of the others.
    """
    runner = TargetRunner(model, attention)
    rng = random.Random(seed)
    texts = [[rng.randrange(runner.vocab_size) for _ in range(length)] for length in lengths]
    trees = [_random_tree(rng, num_nodes) for _ in lengths[1:]]
    nodes = [[rng.randrange(runner.vocab_size) for _ in tree] for tree in trees]
    tables, used = [], 0
    for length in lengths:
        needed = -(-(length + num_nodes) // _PAGE_SIZE)
        tables.append(list(range(used, used + needed)))
        used += needed
    rng.shuffle(pages := list(range(used)))
    tables = [[pages[page] for page in table] for table in tables]
    runner.allocate(used, _PAGE_SIZE)

    half = lengths[0] // 2
    chunks = [texts[0][:half], *(text[:-1] for text in texts[1:])]
    present = [index for index, chunk in enumerate(chunks) if chunk]
    first = TreeBatch.from_lists(
        [len(chunks[i]) for i in present], [0] * len(present), [tables[i] for i in present],
        _PAGE_SIZE, runner.device,
    )  # fmt: skip
    flat = [token for index in present for token in chunks[index]]
    runner.score(flat_batch(flat, first, [], runner.device))

    tail = texts[0][half:]
    committed = [half, *(length - 1 for length in lengths[1:])]
    parents: list[Any] = [len(tail), *trees]
    second = TreeBatch.from_lists(parents, committed, tables, _PAGE_SIZE, runner.device)
    flat = tail + [token for tree in nodes for token in tree]
    got = runner.score(flat_batch(flat, second, range(len(flat)), runner.device))

    paths = [texts[0][: half + row + 1] for row in range(len(tail))]
    for text, tree, tokens in zip(texts[1:], trees, nodes, strict=True):
        paths += [text[:-1] + [tokens[i] for i in _path(tree, row)] for row in range(len(tree))]
    return _worst(model, paths, got)


def _worst(model: PreTrainedModel, paths: Sequence[list[int]], got: torch.Tensor) -> float:
    """Compare rows with the last logits of their paths; a longer path serves its beginnings."""
    stock: dict[tuple[int, ...], torch.Tensor] = {}
    for path in sorted(paths, key=len, reverse=True):
        if tuple(path) not in stock:
            for end, row in enumerate(stock_logits(model, path), 1):
                stock.setdefault(tuple(path[:end]), row)
    errors = [
        (row - stock[tuple(path)]).norm() / stock[tuple(path)].norm()
        for row, path in zip(got, paths, strict=True)
    ]
    return float(torch.stack(errors).max())


def _random_tree(rng: random.Random, num_nodes: int) -> list[int]:
    return [-1, *(rng.randrange(node) for node in range(1, num_nodes))]


def _path(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
