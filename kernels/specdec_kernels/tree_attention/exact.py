"""The exact layout in plain torch: what it means, and the form where nothing faster is at hand.

A row at logical position P reads the keys at positions 0 .. P - W from where they are committed, in
parts of SPLIT positions at absolute multiples, and the last W (NUM_LANES) positions one by one,
nearest first, through its own ancestors. Which matmul a key takes part in, and at which place of
it, thus follows from P and the key's position alone. Every matmul has one fixed shape, which keeps
a row's bits apart from what stands in the other rows; what a row does not see adds exact zeros.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_attention.base import (
    NUM_LANES,
    SPLIT,
    LayerOptions,
    Layout,
    TreeAttentionPlan,
)
from specdec_kernels.tree_attention.reference import ReferencePlan

_TILE = 64
"""Rows times query heads per KV head of a matmul; shorter tiles are padded with zeros."""


class _Softmax(NamedTuple):
    """Of some keys, per row and head: largest score, sum of weights [..], weighted values [.., D].

    A row that sees none of them has (-inf, 0, 0).
    """

    most: Tensor
    total: Tensor
    acc: Tensor


class _Tile(NamedTuple):
    """Rows `rows` of one request; `positions` [M] is padded with -1."""

    request: int
    rows: slice
    positions: Tensor
    deepest: int


class ExactPlan(TreeAttentionPlan):
    """The lanes of every row."""

    impl: ClassVar[str] = "reference"

    def __init__(self, batch: TreeBatch, layout: Layout) -> None:
        super().__init__(batch, layout)
        self._lanes = batch.lane_slots(NUM_LANES).long()

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: LayerOptions
    ) -> Tensor:
        num_kv_heads = key_cache.shape[2]
        groups = query.shape[1] // num_kv_heads
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        caches = _Caches(key_cache, value_cache, options)
        for tile in self._tiles(groups):
            rows = query[tile.rows].to(caches.dtype).unflatten(1, (num_kv_heads, groups))
            rows = _padded(rows.permute(1, 0, 2, 3).flatten(1, 2), tile.positions.shape[0])
            state = _empty(rows)
            for begin in range(0, max(0, tile.deepest - NUM_LANES + 1), SPLIT):
                state = _fold(state, self._part(tile, begin, rows, caches, options))
            state = _fold(state, self._local(tile, rows, groups, caches, options))
            result = _finish(state, options.sinks, groups)[:, : groups * _length(tile.rows)]
            result = result.unflatten(1, (-1, groups)).permute(1, 0, 2, 3)
            out[tile.rows] = result.flatten(1, 2).to(query.dtype)
        return out

    def _tiles(self, groups: int) -> list[_Tile]:
        batch, tiles = self.batch, []
        step = max(1, _TILE // groups)
        height = _TILE if groups <= _TILE else -(-groups // 16) * 16
        positions = batch.positions
        for request in range(batch.num_requests):
            start, end = batch.cu_nodes_host[request : request + 2]
            for first in range(start, end, step):
                rows = slice(first, min(first + step, end))
                own = positions[rows]
                padded = own.new_full((height,), -1)
                padded[: len(own) * groups] = own.repeat_interleave(groups)
                tiles.append(_Tile(request, rows, padded, int(own.max())))
        return tiles

    def _part(
        self, tile: _Tile, begin: int, rows: Tensor, caches: _Caches, options: LayerOptions
    ) -> _Softmax:
        """Positions begin .. begin + SPLIT of those that are W or more behind."""
        batch = self.batch
        slots = torch.arange(begin, begin + SPLIT, device=rows.device)
        last = max(0, tile.deepest - NUM_LANES)
        pages = batch.block_tables[tile.request, slots.clamp(max=last) // batch.page_size].long()
        keys, values = caches.read(
            pages * batch.page_size + slots.clamp(max=last) % batch.page_size
        )
        scores = torch.bmm(rows, keys.permute(1, 2, 0)) * options.scale
        position = tile.positions.unsqueeze(1)
        seen = slots <= position - NUM_LANES
        if options.window is not None:
            seen &= slots > position - options.window
        scores = _capped(scores, options).masked_fill(~seen, float("-inf"))
        most = scores.amax(-1)
        weights = torch.exp(scores - _finite(most).unsqueeze(-1))
        return _Softmax(most, weights.sum(-1), torch.bmm(weights, values.transpose(0, 1)))

    def _local(
        self, tile: _Tile, rows: Tensor, groups: int, caches: _Caches, options: LayerOptions
    ) -> _Softmax:
        """The last W positions of each row, lane by lane."""
        lanes = self._lanes[tile.rows]
        slots = lanes.new_full((rows.shape[1], NUM_LANES), -1)
        slots[: len(lanes) * groups] = lanes.repeat_interleave(groups, dim=0)
        if options.window is not None:
            slots[:, options.window :] = -1
        state = _empty(rows)
        for lane in range(NUM_LANES):
            slot = slots[:, lane]
            keys, values = (part.transpose(0, 1) for part in caches.read(slot.clamp(min=0)))
            scores = (rows * keys).sum(-1) * options.scale
            scores = _capped(scores, options).masked_fill(slot < 0, float("-inf"))
            weight = (slot >= 0).to(rows.dtype).expand_as(scores)
            values = torch.where((slot >= 0).unsqueeze(-1), values, 0.0)
            state = _fold(state, _Softmax(scores, weight, values))
        return state


class _Caches:
    """Reads keys and values of slots in the dtype of the computation."""

    def __init__(self, key_cache: Tensor, value_cache: Tensor, options: LayerOptions) -> None:
        self.dtype = torch.float64 if key_cache.dtype == torch.float64 else torch.float32
        self._caches = [
            (key_cache.flatten(0, 1), options.key_scales),
            (value_cache.flatten(0, 1), options.value_scales),
        ]

    def read(self, slots: Tensor) -> list[Tensor]:
        """Keys and values [len(slots), Hkv, D]."""
        found = []
        for cache, scales in self._caches:
            # Not index_select: torch has none for 8-bit floats.
            numbers = cache[slots].to(self.dtype)
            if scales is not None:
                numbers = numbers * scales.flatten(0, 1)[slots].unsqueeze(-1)
            found.append(numbers)
        return found


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _padded(rows: Tensor, height: int) -> Tensor:
    padded = rows.new_zeros(rows.shape[0], height, rows.shape[2])
    padded[:, : rows.shape[1]] = rows
    return padded


def _empty(rows: Tensor) -> _Softmax:
    most = rows.new_full(rows.shape[:2], float("-inf"))
    return _Softmax(most, torch.zeros_like(most), torch.zeros_like(rows))


def _finite(most: Tensor) -> Tensor:
    return torch.where(most == float("-inf"), 0.0, most)


def _capped(scores: Tensor, options: LayerOptions) -> Tensor:
    if options.softcap is None:
        return scores
    return torch.tanh(scores / options.softcap) * options.softcap


def _fold(state: _Softmax, part: _Softmax) -> _Softmax:
    """The log-sum-exp merge; a part in which a row sees nothing changes nothing."""
    most = torch.maximum(state.most, part.most)
    safe = _finite(most)
    old, new = torch.exp(state.most - safe), torch.exp(part.most - safe)
    return _Softmax(
        most,
        state.total * old + part.total * new,
        state.acc * old.unsqueeze(-1) + part.acc * new.unsqueeze(-1),
    )


def _finish(state: _Softmax, sinks: Tensor | None, groups: int) -> Tensor:
    most, total, acc = state
    if sinks is not None:
        heads = sinks.to(acc.dtype).view(-1, groups)
        sink = most.new_full(most.shape, float("-inf"))
        repeats = most.shape[1] // groups
        sink[:, : repeats * groups] = heads.repeat(1, repeats)
        state = _fold(state, _Softmax(sink, torch.ones_like(sink), torch.zeros_like(acc)))
        total, acc = state.total, state.acc
    return acc / torch.where(total == 0.0, 1.0, total).unsqueeze(-1)


def plain_plan(batch: TreeBatch, layout: Layout) -> TreeAttentionPlan:
    """The form in plain torch that means what the layout says."""
    return ExactPlan(batch, layout) if layout == "exact" else ReferencePlan(batch, layout)
