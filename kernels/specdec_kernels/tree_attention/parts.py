"""Cuts a step into parts for the CPU: rows of one request, where their keys lie, what is hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_attention.masks import ancestor_matrix, visible

# Up to this many contiguous pieces are copied one by one; more are gathered page by page.
_MAX_RUNS = 4
# Chains are cut into blocks of this many rows: bounds masks and skips keys that lie in the future.
_CHAIN_BLOCK = 256


class Part(NamedTuple):
    """Consecutive rows of one request with the keys they can see under one window.

    `runs` are (first physical slot, count) pieces that hold the `length` keys in order; if there
    are too many, `pages` lists the pages instead and the keys start `skip` slots into the first.
    `bias` [rows, keys] is 0 or -inf for the last keys, all earlier ones being seen by every row;
    None if nothing is hidden or `causal` (square, lower triangular) says it all. `fused` chooses
    fused attention instead of matmuls.
    """

    start: int
    rows: int
    length: int
    runs: list[tuple[int, int]]
    pages: Tensor | None
    skip: int
    bias: Tensor | None
    causal: bool
    fused: bool


class PartMaker:
    """Makes the parts of one batch; what does not depend on the window is made once."""

    def __init__(self, batch: TreeBatch) -> None:
        self._batch = batch
        self._tree_bias: dict[torch.dtype, Tensor] = {}

    def make(
        self,
        window: int | None,
        dtype: torch.dtype,
        is_fused: Callable[[int], bool],
        max_rows: int,
    ) -> list[Part]:
        """Parts of all requests that have rows, in row order.

        dtype: of the biases. is_fused: says for a row count whether fused attention takes it.
        max_rows: upper bound for blocks of chains; trees are never cut.
        """
        return [
            self._part(request, start, rows, window, dtype, fused=is_fused(rows))
            for request, start, rows in _row_blocks(self._batch, min(max_rows, _CHAIN_BLOCK))
        ]

    def _part(
        self,
        request: int,
        start: int,
        rows: int,
        window: int | None,
        dtype: torch.dtype,
        *,
        fused: bool,
    ) -> Part:
        batch = self._batch
        # A later block of a chain sees the chain's earlier rows just like committed tokens.
        offset = start - batch.cu_nodes_host[request]
        committed = batch.committed_lens_host[request] + offset
        end = committed + rows
        first = 0 if window is None else max(0, committed - window + 1)
        # The deepest row of a part stands at most at end - 1, so a long window hides nothing.
        windowed = window is not None and end - first > window
        is_chain = batch.is_chain_host[request]
        causal = fused and is_chain and first == committed and rows > 1 and not windowed
        bias = None
        if windowed:
            bias = _bias(visible(batch, request, window, first, offset, rows), dtype)
        elif rows > 1 and not causal:
            bias = (
                _causal_bias(rows, dtype)
                if is_chain
                else self._all_trees(dtype)[start : start + rows, :rows]
            )
            if fused:
                bias = torch.cat([bias.new_zeros(rows, committed - first), bias], dim=1)
        page_size = batch.page_size
        table = batch.block_tables_host[request][first // page_size : -(-end // page_size)]
        skip = first % page_size
        runs = _runs(table, page_size, skip, end - first)
        pages = torch.tensor(table) if len(runs) > _MAX_RUNS else None
        return Part(start, rows, end - first, runs, pages, skip, bias, causal, fused)

    def _all_trees(self, dtype: torch.dtype) -> Tensor:
        bias = self._tree_bias.get(dtype)
        if bias is None:
            bias = _bias(ancestor_matrix(self._batch.ancestors), dtype)
            self._tree_bias[dtype] = bias
        return bias


def _row_blocks(batch: TreeBatch, max_rows: int) -> Iterator[tuple[int, int, int]]:
    for request in range(batch.num_requests):
        start, end = batch.cu_nodes_host[request : request + 2]
        step = max_rows if batch.is_chain_host[request] else max(1, end - start)
        for first in range(start, end, step):
            yield request, first, min(step, end - first)


def _runs(table: list[int], page_size: int, skip: int, length: int) -> list[tuple[int, int]]:
    """Contiguous pieces of `length` slots that begin `skip` slots into the table's first page."""
    runs: list[tuple[int, int]] = []
    begin = 0
    for index in range(1, len(table) + 1):
        if index < len(table) and table[index] == table[index - 1] + 1:
            continue
        runs.append((table[begin] * page_size, (index - begin) * page_size))
        begin = index
    runs[0] = (runs[0][0] + skip, runs[0][1] - skip)
    surplus = len(table) * page_size - skip - length
    runs[-1] = (runs[-1][0], runs[-1][1] - surplus)
    return runs


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


@lru_cache(maxsize=32)
def _causal_bias(rows: int, dtype: torch.dtype) -> Tensor:
    return _bias(torch.ones(rows, rows, dtype=torch.bool).tril_(), dtype)
