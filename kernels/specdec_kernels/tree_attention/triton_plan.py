"""Tree attention in Triton: the plan that owns work lists and scratch, and the launches."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_attention.base import SPLIT, LayerOptions, Layout, TreeAttentionPlan
from specdec_kernels.tree_attention.triton import (
    MAX_HEAD_DIM,
    MERGE_HEADS,
    QUERY_TYPES,
    Variant,
    attention_configuration,
    lanes_of,
    merge_configuration,
)
from specdec_kernels.tree_attention.triton_lists import (
    Blocks,
    Capacity,
    StepInputs,
    WorkList,
    launch,
)

_LOG2E = math.log2(math.e)
_PROGRAMS_PER_PROCESSOR = 2
_PROGRAMS_WITHOUT_GPU = 4


class _Scratch(NamedTuple):
    """States of parts: max and sum fp32 [places, Hkv, BLOCK_M], acc fp32 [.., D]."""

    most: Tensor
    total: Tensor
    acc: Tensor


class TritonPlan(TreeAttentionPlan):
    """Two launches a layer over a work list that is made on the device.

    capacity: fixes every grid, buffer and address, so that a captured graph of `run` serves all
    batches that `update` brings; queries then have `capacity.rows` rows, of which those past the
    batch's are left out. Without it everything is as large as the batch. cascade: read parts that
    requests share once. num_programs: of the attention kernel; by default two per multiprocessor.
    None of the three changes any bit of the result.

    Raises ValueError if the batch is larger than capacity.
    """

    impl: ClassVar[str] = "triton"

    def __init__(
        self,
        batch: TreeBatch,
        layout: Layout,
        *,
        capacity: Capacity | None = None,
        cascade: bool = True,
        num_programs: int | None = None,
        split: int = SPLIT,
    ) -> None:
        super().__init__(batch, layout)
        self._is_fixed = capacity is not None
        self._split = split
        self._num_programs = num_programs or _default_programs(batch.device)
        self._inputs = StepInputs(batch, layout == "exact", capacity, cascade, split)
        self._blocks: dict[int, Blocks] = {}
        self._works: dict[tuple[int, int, int | None], WorkList] = {}
        self._scratch: dict[tuple[int, ...], _Scratch] = {}
        if capacity is not None:
            self.num_rows = capacity.rows

    def update(self, batch: TreeBatch) -> None:
        """Takes the plan to another batch, in place.

        Needs a plan of fixed capacity. The copies and small launches happen outside the graph.

        Raises ValueError if the plan has no capacity, or the batch does not fit it.
        """
        if not self._is_fixed:
            raise ValueError("batch: only a plan with a capacity can be updated; make a new plan")
        self._inputs.take(batch)
        self.batch = batch
        self.num_pages_needed = 1 + max(
            (max(table) for table in batch.block_tables_host if table), default=-1
        )
        for blocks in self._blocks.values():
            blocks.fill()
        for work in self._works.values():
            work.fill()

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: LayerOptions
    ) -> Tensor:
        _check(query, key_cache, value_cache)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if not self.num_rows:
            return out
        if query.stride(2) != 1:
            query = query.contiguous()
        groups = query.shape[1] // key_cache.shape[2]
        variant = Variant(
            query.dtype, key_cache.dtype, query.shape[2], self.layout == "exact",
            options.window is not None, options.softcap is not None, options.sinks is not None,
            lanes_of(groups), _alignment(query, key_cache, value_cache), self._split,
        )  # fmt: skip
        work = self._work(variant.block_m, groups, key_cache.shape[2], options.window)
        scratch = self._scratch_of(work.blocks.max_places, key_cache.shape[2], variant)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        self._attend(variant, work, scratch, query, key_cache, value_cache, out, options, sinks)
        self._merge(variant, work, scratch, key_cache.shape[2], out, sinks)
        return out

    def _attend(
        self,
        variant: Variant,
        work: WorkList,
        scratch: _Scratch,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        options: LayerOptions,
        sinks: Tensor | None,
    ) -> None:
        inputs, blocks = self._inputs, work.blocks
        if key_cache.dtype == torch.float8_e4m3fn:
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        scale = options.scale * _LOG2E
        softcap = 1.0
        if options.softcap is not None:
            scale, softcap = 2.0 * scale / options.softcap, options.softcap * _LOG2E
        kv_heads = key_cache.shape[2]
        launch(attention_configuration(variant), (self._num_programs,), [
            query, key_cache, value_cache,
            _or_any(options.key_scales, scratch), _or_any(options.value_scales, scratch),
            _or_any(sinks, scratch), out, *scratch,
            work.items, work.num_items, blocks.requests, blocks.rows,
            blocks.row_positions, blocks.row_limits, inputs.cu_nodes, inputs.block_tables,
            inputs.words, inputs.lane_slots,
            scale, softcap, options.window or 0, kv_heads, query.shape[1] // kv_heads,
            blocks.rows_per_block, inputs.page_size.bit_length() - 1,
            inputs.block_tables.shape[1], inputs.words.shape[1],
            *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
            *out.stride()[:2],
        ])  # fmt: skip

    def _merge(
        self,
        variant: Variant,
        work: WorkList,
        scratch: _Scratch,
        kv_heads: int,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        blocks, num_heads = work.blocks, out.shape[1]
        grid = (self.num_rows, -(-num_heads // MERGE_HEADS))
        launch(merge_configuration(variant), grid, [
            *scratch, _or_any(sinks, scratch), out,
            blocks.row_blocks, blocks.row_lanes, blocks.shared_blocks, blocks.shared_lanes,
            work.places, work.parts,
            num_heads, kv_heads, num_heads // kv_heads, *out.stride()[:2],
        ])  # fmt: skip

    def _work(self, block_m: int, groups: int, kv_heads: int, window: int | None) -> WorkList:
        rows = block_m // groups
        key = (rows, kv_heads, window)
        work = self._works.get(key)
        if work is None:
            blocks = self._blocks.get(rows)
            if blocks is None:
                blocks = self._blocks[rows] = Blocks(self._inputs, rows, block_m)
            work = WorkList(blocks, kv_heads, window, self._num_programs)
            self._works[key] = work
        return work

    def _scratch_of(self, places: int, kv_heads: int, variant: Variant) -> _Scratch:
        key = (places, kv_heads, variant.block_m, variant.head_dim)
        scratch = self._scratch.get(key)
        if scratch is None:
            device = self._inputs.cu_nodes.device
            most, total = (torch.empty(key[:3], device=device) for _ in range(2))
            scratch = _Scratch(most, total, torch.empty(key, device=device))
            self._scratch[key] = scratch
        return scratch


def _default_programs(device: torch.device) -> int:
    if device.type == "cpu":
        return _PROGRAMS_WITHOUT_GPU
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS_PER_PROCESSOR * processors


def _or_any(tensor: Tensor | None, scratch: _Scratch) -> Tensor:
    """A pointer has to be passed even where the kernel reads none."""
    return scratch.most if tensor is None else tensor


def _alignment(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> int:
    """The largest of 16, 8 and 1 that divides where rows of elements begin, in elements."""
    strides = [*query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3]]
    common = math.gcd(query.shape[2], *strides)
    return next(size for size in (16, 8, 1) if common % size == 0)


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    if query.dtype not in QUERY_TYPES:
        raise ValueError(
            f'query: the "triton" form computes fp16, bf16 and fp32, got {query.dtype}; use '
            'impl="reference"'
        )
    head_dim = query.shape[2]
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f'query: the "triton" form computes head dimensions that are multiples of 8 up to '
            f'{MAX_HEAD_DIM}, got {head_dim}; use impl="reference"'
        )
    if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
        raise ValueError("key_cache and value_cache: the head dimension must be contiguous")
