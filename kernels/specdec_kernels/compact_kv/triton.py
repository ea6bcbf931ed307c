"""compact_kv, copy_pages and compact_paths as Triton launches; imported only when chosen.

Data move as integers of 8, 4, 2 or 1 bytes, whatever they mean. A program owns some columns of one
group's entries and makes all moves of those columns, so no other program reads what it writes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.compact_kv.reference import reference_move
from specdec_kernels.configuration import Configuration

_UNITS = {torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.uint8: "u8"}
_COUNTS = (16, 64, 256, 1024)
"""Moves that one program stages in registers; of more, torch makes two launches a stack."""
_ELEMENTS = 2048
_STEP, _COLUMNS = 16, 64
"""Nodes of a path that are staged together, and columns of a program."""
_MOVE_WARPS, _PATH_WARPS, _NUM_STAGES = 4, 2, 1


# fmt: off
@triton.jit
def _stage_and_store(cache_ptr, src, dst, units, mask):
    data = tl.load(cache_ptr + src[:, None] + units[None, :], mask=mask)
    # Another thread may store where this one loads: all loads of the program come first.
    tl.debug_barrier()
    tl.store(cache_ptr + dst[:, None] + units[None, :], data, mask=mask)


@triton.jit
def move_kernel(
    first_ptr, second_ptr, src_ptr, dst_ptr, num_moves, num_entries, entry_units,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(entry_units, COLUMNS)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    units = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    cache_ptr = first_ptr
    if tl.program_id(1) == 1:
        cache_ptr = second_ptr
    cache_ptr += group * num_entries * entry_units
    index = tl.arange(0, COUNT)
    src = tl.load(src_ptr + index, mask=index < num_moves, other=0)
    dst = tl.load(dst_ptr + index, mask=index < num_moves, other=0)
    mask = (src != dst)[:, None] & (units < entry_units)[None, :]
    _stage_and_store(cache_ptr, src * entry_units, dst * entry_units, units, mask)


@triton.jit
def _slots(table_ptr, logical, mask, page_shift):
    pages = tl.load(table_ptr + (logical >> page_shift), mask=mask, other=0).to(tl.int64)
    return (pages << page_shift) + (logical & ((1 << page_shift) - 1))


@triton.jit
def compact_paths_kernel(
    first_ptr, second_ptr, paths_ptr, num_nodes_ptr, cu_nodes_ptr, committed_ptr, tables_ptr,
    path_row, path_width, table_width, page_shift, num_slots, slot_units,
    STEP: tl.constexpr, COLUMNS: tl.constexpr,
):
    blocks = tl.cdiv(slot_units, COLUMNS)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    units = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    request = tl.program_id(1).to(tl.int64)
    cache_ptr = first_ptr
    if tl.program_id(2) == 1:
        cache_ptr = second_ptr
    cache_ptr += group * num_slots * slot_units
    table_ptr = tables_ptr + request * table_width
    committed = tl.load(committed_ptr + request)
    rows = tl.load(cu_nodes_ptr + request + 1) - tl.load(cu_nodes_ptr + request)
    count = tl.minimum(tl.load(num_nodes_ptr + request), path_width)
    # Nodes of a path are at least as high as their places, so what is written here, below the next
    # first, no later step reads.
    for first in range(0, count, STEP):
        place = first + tl.arange(0, STEP)
        node = tl.load(paths_ptr + request * path_row + place, mask=place < count, other=-1)
        moving = (node > place) & (node < rows)
        src = _slots(table_ptr, committed + node, moving, page_shift) * slot_units
        dst = _slots(table_ptr, committed + place, moving, page_shift) * slot_units
        mask = moving[:, None] & (units < slot_units)[None, :]
        _stage_and_store(cache_ptr, src, dst, units, mask)
# fmt: on


def _in_units(cache: Tensor, entry_dims: int) -> Tensor:
    """The cache as [num_groups, num_entries, units]; entries have the last dimensions."""
    shape = (cache.shape[0], prod(cache.shape[1:-entry_dims]), prod(cache.shape[-entry_dims:]))
    flat = cache.view(torch.uint8).view(*shape[:2], shape[2] * cache.dtype.itemsize)
    for unit in _UNITS:
        if flat.shape[2] % unit.itemsize == 0 and flat.storage_offset() % unit.itemsize == 0:
            return flat.view(unit)
    return flat


def _pairs(caches: Sequence[Tensor], entry_dims: Sequence[int]) -> Iterator[list[Tensor]]:
    """Stacks that one launch can take: two of one shape, or one that has no other."""
    waiting: dict[tuple[object, ...], Tensor] = {}
    for cache, dims in zip(caches, entry_dims, strict=True):
        if cache.numel():
            view = _in_units(cache, dims)
            other = waiting.pop((view.shape, view.dtype), None)
            if other is None:
                waiting[(view.shape, view.dtype)] = view
            else:
                yield [other, view]
    yield from ([view] for view in waiting.values())


def move_constants(num_moves: int) -> dict[str, Any]:
    """What a launch of so many moves fixes at compile time; at most the last of `_COUNTS`."""
    count = next(count for count in _COUNTS if count >= num_moves)
    return {"COUNT": count, "COLUMNS": _ELEMENTS // count}


def path_constants() -> dict[str, Any]:
    """What a launch of compact_paths fixes at compile time."""
    return {"STEP": _STEP, "COLUMNS": _COLUMNS}


def configurations() -> list[Configuration]:
    """Every shipped form."""
    found = []
    for unit in _UNITS.values():
        caches = dict.fromkeys(("first_ptr", "second_ptr"), f"*{unit}")
        signature = caches | dict.fromkeys(("src_ptr", "dst_ptr"), "*i64")
        signature |= {"num_moves": "i32", "num_entries": "i32:16", "entry_units": "i32:16"}
        for count in _COUNTS:
            name = f"compact_kv/move/{unit}-n{count}"
            constants = move_constants(count)
            found.append(
                Configuration(
                    name, move_kernel, signature, constants, _MOVE_WARPS, _NUM_STAGES, False
                )
            )
        signature = caches | {
            "paths_ptr": "*i32", "num_nodes_ptr": "*i32", "cu_nodes_ptr": "*i32",
            "committed_ptr": "*i32", "tables_ptr": "*i32", "path_row": "i32", "path_width": "i32",
            "table_width": "i32", "page_shift": "i32", "num_slots": "i32:16",
            "slot_units": "i32:16",
        }  # fmt: skip
        name, constants = f"compact_kv/paths/{unit}", path_constants()
        found.append(
            Configuration(
                name, compact_paths_kernel, signature, constants, _PATH_WARPS, _NUM_STAGES, False
            )
        )
    return found


def triton_move(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """As `reference_move`: entries are everything behind dimension 1."""
    num_moves = src.shape[0]
    if num_moves > _COUNTS[-1]:
        reference_move(caches, src, dst)
        return
    src, dst = src.contiguous(), dst.contiguous()
    fixed = move_constants(num_moves)
    for stacks in _pairs(caches, [cache.dim() - 2 for cache in caches]):
        groups, entries, units = stacks[0].shape
        move_kernel[(groups * triton.cdiv(units, fixed["COLUMNS"]), len(stacks))](
            stacks[0], stacks[-1], src, dst, num_moves, entries, units,
            num_warps=_MOVE_WARPS, num_stages=_NUM_STAGES, **fixed,
        )  # fmt: skip


def triton_compact_paths(
    caches: Sequence[Tensor], batch: TreeBatch, paths: Tensor, num_nodes: Tensor
) -> None:
    """As `compact_paths`, without its checks."""
    requests, width = paths.shape
    if paths.stride(1) != 1:
        paths = paths.contiguous()
    fixed = path_constants()
    for stacks in _pairs(caches, [cache.dim() - 3 for cache in caches]):
        groups, slots, units = stacks[0].shape
        grid = (groups * triton.cdiv(units, fixed["COLUMNS"]), requests, len(stacks))
        compact_paths_kernel[grid](
            stacks[0], stacks[-1], paths, num_nodes.contiguous(), batch.cu_nodes,
            batch.committed_lens, batch.block_tables, paths.stride(0), width,
            batch.block_tables.shape[1], batch.page_size.bit_length() - 1, slots, units,
            num_warps=_PATH_WARPS, num_stages=_NUM_STAGES, **fixed,
        )  # fmt: skip
