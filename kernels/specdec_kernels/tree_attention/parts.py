"""Cuts a step into parts for the CPU: rows of one request, where their keys lie, what is hidden."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_attention.masks import ancestor_matrix, visible

# Up to this many contiguous pieces are copied one by one; more are gathered page by page.
_MAX_RUNS = 4
# Chains are cut into blocks of this many rows: bounds masks and skips keys that lie in the future.
_CHAIN_BLOCK = 256


class Span(NamedTuple):
    """Where the keys lie that the rows of one request can see under one window.

    `runs` are (first physical slot, count) pieces that hold the `length` keys in order; if there
    are too many, `pages` lists the pages instead and the keys start `skip` slots into the first.
    `room` slots hold the keys, or all of those pages.
    """

    length: int
    runs: list[tuple[int, int]]
    pages: Tensor | None
    skip: int
    room: int


class Part(NamedTuple):
    """Consecutive rows of one request with the keys they can see under one window.

    `first` and `length` say which keys of the request's span these are. `bias` [rows, keys] is 0 or
    -inf for the last keys, all earlier ones being seen by every row; None if nothing is hidden or
    `causal` (square, lower triangular) says it all. `fused` chooses fused attention instead of
    matmuls.
    """

    start: int
    rows: int
    first: int
    length: int
    bias: Tensor | None
    causal: bool
    fused: bool


class PartMaker:
    """Makes the parts of one batch; what does not depend on the window is made once."""

    def __init__(self, batch: TreeBatch) -> None:
        self._batch = batch
        self._tree_bias: dict[torch.dtype, Tensor] = {}
        self._chain_biases: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def make(
        self,
        window: int | None,
        dtype: torch.dtype,
        is_fused: Callable[[int], bool],
        block_rows: Callable[[int], int],
    ) -> list[tuple[Span, list[Part]]]:
        """The keys of every request that has rows, and its parts in row order.

        dtype: of the biases. is_fused: says for a row count whether fused attention takes it.
        block_rows: upper bound for the rows of a chain's parts, by the number of keys; trees are
        never cut.
        """
        batch = self._batch
        made = []
        for request, (start, end) in enumerate(pairwise(batch.cu_nodes_host)):
            if start == end:
                continue
            committed = batch.committed_lens_host[request]
            first = 0 if window is None else max(0, committed - window + 1)
            span = self._span(request, first, committed + end - start)
            step = end - start
            if batch.is_chain_host[request]:
                step = min(step, _CHAIN_BLOCK, block_rows(span.length))
            parts = [
                self._part(request, row, min(step, end - row), first, window, dtype, is_fused)
                for row in range(start, end, step)
            ]
            made.append((span, parts))
        return made

    def _span(self, request: int, first: int, end: int) -> Span:
        page_size = self._batch.page_size
        table = self._batch.block_tables_host[request][first // page_size : -(-end // page_size)]
        skip = first % page_size
        runs = _runs(table, page_size, skip, end - first)
        length = end - first
        if len(runs) <= _MAX_RUNS:
            return Span(length, runs, None, skip, length)
        return Span(length, runs, torch.tensor(table), skip, len(table) * page_size)

    def _part(
        self,
        request: int,
        start: int,
        rows: int,
        span_first: int,
        window: int | None,
        dtype: torch.dtype,
        is_fused: Callable[[int], bool],
    ) -> Part:
        batch = self._batch
        fused = is_fused(rows)
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
        if rows > 1 and not causal:
            if is_chain:
                lead = committed - first if fused or windowed else 0
                bias = self._chain_bias(rows, lead, window if windowed else None, dtype)
            elif windowed:
                bias = _bias(visible(batch, request, window, first, offset, rows), dtype)
            else:
                bias = self._all_trees(dtype)[start : start + rows, :rows]
                if fused:
                    bias = torch.cat([bias.new_zeros(rows, committed - first), bias], dim=1)
        return Part(start, rows, first - span_first, end - first, bias, causal, fused)

    def _all_trees(self, dtype: torch.dtype) -> Tensor:
        bias = self._tree_bias.get(dtype)
        if bias is None:
            bias = _bias(ancestor_matrix(self._batch.ancestors), dtype)
            self._tree_bias[dtype] = bias
        return bias

    def _chain_bias(self, rows: int, lead: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 or -inf [rows, lead + rows] for rows of a chain after `lead` earlier keys.

        What a row sees depends on distances only, so that all chains share one matrix a step, made
        for the longest.
        """
        if not lead and window is None:
            return _causal_bias(rows, dtype)
        wide = self._chain_biases.get((window, dtype))
        if wide is None:
            wide = self._widest_chain_bias(window, dtype)
            self._chain_biases[window, dtype] = wide
        skip = wide.shape[1] - wide.shape[0] - lead
        return wide[:rows].narrow(1, skip, lead + rows)

    def _widest_chain_bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        batch = self._batch
        chains = [
            (committed, end - start)
            for committed, (start, end), is_chain in zip(
                batch.committed_lens_host, pairwise(batch.cu_nodes_host), batch.is_chain_host,
                strict=True,
            )
            if is_chain and end > start
        ]  # fmt: skip
        rows = min(_CHAIN_BLOCK, max(count for _, count in chains))
        lead = max(committed + count for committed, count in chains)
        if window is not None:
            lead = min(lead, window - 1)
        hidden = torch.full((rows, lead + rows), float("-inf"), dtype=dtype)
        if window is None:
            return hidden.triu_(lead + 1)
        return hidden.tril(lead - window).add_(hidden.triu_(lead + 1))


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
