"""Buffers of the Triton form's work lists, and the launches that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.configuration import Configuration
from specdec_kernels.tree_attention.base import NUM_LANES, check_exact
from specdec_kernels.tree_attention.cascade import SharedPrefix, shared_prefixes
from specdec_kernels.tree_attention.triton import work_configurations
from specdec_kernels.tree_attention.triton_kernels import ITEM_FIELDS
from specdec_kernels.tree_attention.triton_work import MUST_SPLIT

MAX_PLACES = 512
"""Parts that scratch holds by default; blocks that do not find room are not split."""
_MAX_WORDS = 8
_NO_WINDOW = 1 << 30
_BLOCK_PROGRAMS = 8
_ITEM_PROGRAMS = 32


class Capacity(NamedTuple):
    """Upper bounds of all batches that a plan with fixed buffers will see.

    pages: of one block table. places: parts of contexts that scratch can hold, each of which takes
    4 * Hkv * BLOCK_M * (head_dim + 2) bytes.
    """

    requests: int
    rows: int
    pages: int
    places: int = MAX_PLACES


def launch(configuration: Configuration, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
    """Runs a kernel as the configuration says; arguments in the kernel's order."""
    configuration.kernel[grid](
        *arguments,
        **configuration.constants,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
    )


class StepInputs:
    """What the kernels read of a batch: its own tensors, or copies of them in fixed places.

    words: the ancestor words, cut into 32 bits each.

    prefixes: what requests share, found on the host. max_requests, max_rows: sizes of the tensors;
    requests past the batch's have no rows.
    """

    def __init__(
        self, batch: TreeBatch, exact: bool, capacity: Capacity | None, cascade: bool, split: int
    ) -> None:
        self.exact = exact
        self.split = split
        self.page_size = batch.page_size
        self.capacity = capacity
        self._cascade = cascade
        self.max_requests, self.max_rows = batch.num_requests, batch.num_rows
        self.cu_nodes, self.committed_lens = batch.cu_nodes, batch.committed_lens
        self.block_tables, self.is_chain = batch.block_tables, batch.is_chain
        self.depths, self.words = batch.depths, batch.ancestors.view(torch.int32)
        self.lane_slots = batch.cu_nodes  # In the fast layout only a pointer is needed.
        if capacity is not None:
            self._allocate(capacity, batch.device)
            self.take(batch)
            return
        if exact:
            self.lane_slots = batch.lane_slots(NUM_LANES)
        self._look_at(batch)

    def _allocate(self, capacity: Capacity, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_requests, self.max_rows = capacity.requests, capacity.rows
        self.cu_nodes = zeros(capacity.requests + 1)
        self.committed_lens = zeros(capacity.requests)
        self.block_tables = zeros(capacity.requests, capacity.pages)
        self.is_chain = zeros(capacity.requests, dtype=torch.bool)
        self.depths = zeros(capacity.rows)
        self.words = zeros(capacity.rows, _MAX_WORDS)
        self.lane_slots = zeros(capacity.rows, NUM_LANES) if self.exact else self.cu_nodes

    def take(self, batch: TreeBatch) -> None:
        """Copies a batch into the fixed places. Raises ValueError if it does not fit them."""
        self._check(batch)
        requests, rows = batch.num_requests, batch.num_rows
        self.cu_nodes[: requests + 1].copy_(batch.cu_nodes)
        self.cu_nodes[requests + 1 :].fill_(rows)
        self.committed_lens[:requests].copy_(batch.committed_lens)
        self.is_chain[:requests].copy_(batch.is_chain)
        self.block_tables[:requests, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        self.depths[:rows].copy_(batch.depths)
        words = batch.ancestors.view(torch.int32)
        self.words[:rows, : words.shape[1]].copy_(words)
        if self.exact:
            self.lane_slots[:rows].copy_(batch.lane_slots(NUM_LANES))
        self._look_at(batch)

    def _check(self, batch: TreeBatch) -> None:
        assert self.capacity is not None
        sizes = (batch.num_requests, batch.num_rows, batch.block_tables.shape[1])
        if any(size > bound for size, bound in zip(sizes, self.capacity, strict=False)):
            raise ValueError(
                f"batch: {sizes[0]} requests, {sizes[1]} rows and {sizes[2]} pages in a block "
                f"table do not fit the plan's {self.capacity}"
            )
        if batch.page_size != self.page_size or batch.device != self.cu_nodes.device:
            raise ValueError(
                f"batch: page size {batch.page_size} on {batch.device}, the plan was made for "
                f"{self.page_size} on {self.cu_nodes.device}"
            )
        if self.exact:
            check_exact(batch)

    def _look_at(self, batch: TreeBatch) -> None:
        self.counts = [end - start for start, end in pairwise(batch.cu_nodes_host)]
        self.starts = batch.cu_nodes_host
        self.lengths = batch.committed_lens_host
        self.are_chains = batch.is_chain_host
        self.prefixes = shared_prefixes(batch, self.split) if self._cascade else []

    def most_parts(self, request: int, rows_per_block: int) -> int:
        """At least the parts of all blocks of one request; at most a few more."""
        local = self.exact or not self.are_chains[request]
        length, count = self.lengths[request], self.counts[request]
        total = 0
        for first in range(0, count, rows_per_block):
            last = length + min(first + rows_per_block, count) - 1
            if self.exact:
                # A tree's rows may be numbered in any order of depth.
                last = (last if self.are_chains[request] else length + count - 1) - NUM_LANES
            elif not self.are_chains[request]:
                last = length - 1
            total += max(0, last + self.split) // self.split + local
        return total


class Blocks:
    """The blocks of rows of a step, for one number of rows per block.

    Per row: position, the last slot that it reads in parts, its block (-1: none) and its place in
    it, and the same of a block whose rows are of several requests (-1: none). Per block: the
    request whose block table it reads, its rows (-1: none), the least position, the largest last
    slot, parts that others read for it, and flags.
    """

    def __init__(self, inputs: StepInputs, rows_per_block: int, block_m: int) -> None:
        self.inputs = inputs
        self.rows_per_block = rows_per_block
        self.block_m = block_m
        device, rows = inputs.cu_nodes.device, inputs.max_rows

        def make(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self.max_blocks = 2 * (inputs.max_requests + -(-rows // rows_per_block))
        self.row_positions, self.row_limits = make(rows), make(rows)
        self.row_blocks, self.row_lanes = make(rows), make(rows)
        self.shared_blocks, self.shared_lanes = make(rows, value=-1), make(rows)
        self.shared_parts = make(inputs.max_requests)
        self.requests = make(self.max_blocks)
        self.rows = make(self.max_blocks, rows_per_block)
        self.lows, self.limits = make(self.max_blocks), make(self.max_blocks)
        self.skips, self.flags = make(self.max_blocks), make(self.max_blocks)
        self.num_shared, self.num_blocks = make(1), make(1)
        if inputs.capacity is not None:
            self.max_places = inputs.capacity.places
        else:
            every = range(inputs.max_requests)
            needed = sum(inputs.most_parts(request, rows_per_block) for request in every)
            self.max_places = max(1, min(MAX_PLACES, needed))
        self._has_shared = False
        self.fill()

    def fill(self) -> None:
        """Makes the blocks of the batch that the inputs hold now."""
        inputs = self.inputs
        shared = self._affordable()
        if shared or self._has_shared:
            self._fill_shared(shared)
        self._has_shared = bool(shared)
        configuration = work_configurations(inputs.exact, self.block_m, inputs.split)[0]
        programs = min(_BLOCK_PROGRAMS, -(-inputs.max_rows // self.rows_per_block))
        launch(configuration, (inputs.max_requests + 1, programs), [
            inputs.cu_nodes, inputs.committed_lens, inputs.depths, inputs.is_chain,
            self.shared_parts, self.num_shared,
            self.row_positions, self.row_limits, self.row_blocks, self.row_lanes,
            self.requests, self.rows, self.lows, self.limits, self.skips,
            self.flags, self.num_blocks, inputs.max_requests, inputs.max_rows, self.rows_per_block,
        ])  # fmt: skip

    def _affordable(self) -> list[SharedPrefix]:
        """The groups whose rows' parts all find room in scratch, as the rest must be split too."""
        left = self.max_places
        chosen = []
        for prefix in self.inputs.prefixes:
            rows = sum(self.inputs.counts[request] for request in prefix.requests)
            places = -(-rows // self.rows_per_block) * prefix.parts
            for request in prefix.requests:
                places += self.inputs.most_parts(request, self.rows_per_block)
                blocks = -(-self.inputs.counts[request] // self.rows_per_block)
                places -= blocks * prefix.parts
            if places <= left:
                chosen.append(prefix)
                left -= places
        return chosen

    def _fill_shared(self, shared: list[SharedPrefix]) -> None:
        inputs, size = self.inputs, self.rows_per_block
        blocks, lanes = [-1] * inputs.max_rows, [0] * inputs.max_rows
        parts = [0] * inputs.max_requests
        table: list[tuple[int, int, int, list[int]]] = []
        for prefix in shared:
            rows: list[int] = []
            for request in prefix.requests:
                parts[request] = prefix.parts
                start = inputs.starts[request]
                rows += range(start, start + inputs.counts[request])
            low = min(inputs.lengths[request] for request in prefix.requests)
            for first in range(0, len(rows), size):
                held = rows[first : first + size]
                for lane, row in enumerate(held):
                    blocks[row], lanes[row] = len(table), lane
                held += [-1] * (size - len(held))
                table.append((prefix.requests[0], low, prefix.parts * inputs.split - 1, held))
        count = len(table)
        for target, values in (
            (self.shared_blocks, blocks), (self.shared_lanes, lanes), (self.shared_parts, parts),
            (self.num_shared, [count]),
            (self.requests[:count], [request for request, *_ in table]),
            (self.lows[:count], [low for _, low, *_ in table]),
            (self.limits[:count], [limit for *_, limit, _ in table]),
            (self.rows[:count].view(-1), [row for *_, held in table for row in held]),
        ):  # fmt: skip
            target.copy_(torch.tensor(values, dtype=torch.int32))
        self.skips[:count].zero_()
        self.flags[:count].fill_(MUST_SPLIT.value)


class WorkList:
    """Items of work for one window and number of KV heads, and where split blocks left parts."""

    def __init__(
        self, blocks: Blocks, kv_heads: int, window: int | None, num_programs: int
    ) -> None:
        self.blocks = blocks
        self._kv_heads = kv_heads
        self._window = _NO_WINDOW if window is None else window
        self._num_programs = num_programs
        device, count = blocks.requests.device, blocks.max_blocks

        def make(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.firsts, self.parts = make(count), make(count)
        self.places, self._first_items = make(count), make(count)
        self.items, self.num_items = make(count + blocks.max_places, ITEM_FIELDS.value), make(1)
        self.fill()

    def fill(self) -> None:
        """Makes the items for the blocks as they are now."""
        blocks = self.blocks
        inputs = blocks.inputs
        _, split, items = work_configurations(inputs.exact, blocks.block_m, inputs.split)
        launch(split, (1,), [
            blocks.num_blocks, blocks.lows, blocks.limits, blocks.skips, blocks.flags,
            self.firsts, self.parts, self.places, self._first_items, self.num_items,
            self._window, self._kv_heads, self._num_programs, blocks.max_places,
        ])  # fmt: skip
        launch(items, (min(blocks.max_blocks, _ITEM_PROGRAMS),), [
            blocks.num_blocks, blocks.flags, self.firsts, self.parts, self.places,
            self._first_items, self.items,
        ])  # fmt: skip
