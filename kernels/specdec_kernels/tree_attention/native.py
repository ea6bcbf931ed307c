"""Tree attention on the CPU as compiled C++ (`tree_attention.cpp`): both layouts in one form.

Sums run in the order of logical positions, so that rows are exact whatever the layout; see there.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.compiled import ELEMENT_TYPES, load_library
from specdec_kernels.tree_attention.base import SPLIT, LayerOptions, Layout, TreeAttentionPlan

_MAX_DIM = 256
_MAX_GROUPS = 64

_POINTERS = (
    "query", "keys", "values", "key_scales", "value_scales", "sinks", "out",
    "cu_nodes", "committed", "tables", "depths", "parents", "is_chain",
)  # fmt: skip
_INTEGERS = (
    "query_row", "query_head", "key_page", "key_slot", "key_head", "value_page", "value_slot",
    "value_head", "table_width", "num_requests", "num_heads", "num_kv_heads", "dim", "page_shift",
    "window", "query_type", "cache_type", "num_threads",
)  # fmt: skip


class _Arguments(ctypes.Structure):
    """`Arguments` of tree_attention.cpp."""

    _fields_: ClassVar[Any] = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


@cache
def _function() -> Any:
    folder = Path(__file__).parent
    sources = (folder / "tree_attention.cpp", folder.parent / "vectors.h")
    library = load_library(sources, (f"SPLIT={SPLIT}",))
    function = library.specdec_tree_attention
    function.argtypes = [ctypes.POINTER(_Arguments)]
    function.restype = None
    return function


def supports(query: Tensor, key_cache: Tensor) -> bool:
    """Whether the compiled form computes these dtypes, head dimension and group size."""
    num_heads, head_dim = query.shape[1:]
    return (
        query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and key_cache.dtype in ELEMENT_TYPES
        and head_dim % 8 == 0
        and head_dim <= _MAX_DIM
        and num_heads // key_cache.shape[2] <= _MAX_GROUPS
    )


class NativePlan(TreeAttentionPlan):
    """The arguments that all layers share.

    Raises CompileError if the form cannot be compiled on this machine.
    """

    impl: ClassVar[str] = "cpu"

    def __init__(self, batch: TreeBatch, layout: Layout) -> None:
        super().__init__(batch, layout)
        self._function = _function()
        self._arguments = _Arguments(
            cu_nodes=batch.cu_nodes.data_ptr(),
            committed=batch.committed_lens.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            depths=batch.depths.data_ptr(),
            parents=batch.parents.data_ptr(),
            is_chain=batch.is_chain.data_ptr(),
            table_width=batch.block_tables.shape[1],
            num_requests=batch.num_requests,
            page_shift=batch.page_size.bit_length() - 1,
            num_threads=torch.get_num_threads(),
        )

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: LayerOptions
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        if not self.num_rows:
            return out
        if query.stride(2) != 1:
            query = query.contiguous()
        if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
            raise ValueError("key_cache and value_cache: the head dimension must be contiguous")
        a = self._arguments
        a.query, a.keys, a.values = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        a.out = out.data_ptr()
        a.query_row, a.query_head = query.stride()[:2]
        a.key_page, a.key_slot, a.key_head = key_cache.stride()[:3]
        a.value_page, a.value_slot, a.value_head = value_cache.stride()[:3]
        a.num_heads, a.num_kv_heads, a.dim = query.shape[1], *key_cache.shape[2:]
        a.query_type, a.cache_type = ELEMENT_TYPES[query.dtype], ELEMENT_TYPES[key_cache.dtype]
        a.scale, a.window, a.softcap = options.scale, options.window or 0, options.softcap or 0.0
        sinks = options.sinks if options.sinks is None else options.sinks.float().contiguous()
        a.sinks = None if sinks is None else sinks.data_ptr()
        a.key_scales = None if options.key_scales is None else options.key_scales.data_ptr()
        a.value_scales = None if options.value_scales is None else options.value_scales.data_ptr()
        self._function(ctypes.byref(a))
        return out
