"""write_kv on the CPU: compiled C++ (`write_kv.cpp`) where there is a compiler, torch otherwise."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from specdec_kernels.compiled import ELEMENT_TYPES, CompileError, load_library
from specdec_kernels.write_kv.reference import check_range, reference_write_kv

_MAX_DIM = 256


class _Arguments(ctypes.Structure):
    """`Arguments` of write_kv.cpp."""

    _fields_: ClassVar[Any] = [
        (name, ctypes.c_void_p)
        for name in (
            "key", "value", "key_cache", "value_cache", "key_scales", "value_scales", "slots",
        )
    ] + [
        (name, ctypes.c_int64)
        for name in (
            "key_row", "key_head", "value_row", "value_head", "num_rows", "num_heads", "dim",
            "num_slots", "row_type", "cache_type",
        )
    ]  # fmt: skip


@cache
def _function() -> Any:
    folder = Path(__file__).parent
    try:
        library = load_library((folder / "write_kv.cpp", folder.parent / "vectors.h"))
    except CompileError:
        return None
    function = library.specdec_write_kv
    function.argtypes = [ctypes.POINTER(_Arguments)]
    function.restype = ctypes.c_int64
    return function


def cpu_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """As `write_kv`, without checks but that of the slots' range."""
    function = _function()
    known = key.dtype in ELEMENT_TYPES and key_cache.dtype in ELEMENT_TYPES
    if function is None or not known or key.shape[2] > _MAX_DIM:
        reference_write_kv(key, value, key_cache, value_cache, slots, key_scales, value_scales)
        return
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    slots = slots.contiguous()
    num_rows, num_heads, dim = key.shape
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    arguments = _Arguments(
        key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        None if key_scales is None else key_scales.data_ptr(),
        None if value_scales is None else value_scales.data_ptr(),
        slots.data_ptr(), *key.stride()[:2], *value.stride()[:2], num_rows, num_heads, dim,
        num_slots, ELEMENT_TYPES[key.dtype], ELEMENT_TYPES[key_cache.dtype],
    )  # fmt: skip
    if function(ctypes.byref(arguments)) >= 0:
        check_range(slots, num_slots)
