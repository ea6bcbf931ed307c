"""Which compiled forms of the attention kernels there are; launches and the gate read them here.

Imported only when chosen. Tile shapes depend on dtypes, head_dim and the layout alone, and on the
number of heads where a row's heads fill more than a tile: never on a batch, or bits would.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from specdec_kernels.configuration import Configuration
from specdec_kernels.tree_attention.base import NUM_LANES, SPLIT
from specdec_kernels.tree_attention.triton_kernels import (
    RUNTIME_INTEGERS,
    attention_kernel,
    merge_kernel,
)
from specdec_kernels.tree_attention.triton_work import (
    CHUNK,
    blocks_kernel,
    items_kernel,
    split_kernel,
)

BLOCK_M = 64
"""Lanes of a block: rows times the query heads of one KV head."""
MERGE_HEADS = 8
MAX_HEAD_DIM = 256
QUERY_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_CACHE_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}
_CACHE_TYPES = {**QUERY_TYPES, torch.int8: "i8", torch.float8_e4m3fn: "u8"}


class Variant(NamedTuple):
    """What the attention kernel is compiled for.

    query, cache: dtypes; cache float8_e4m3fn is passed as bytes. block_m: `lanes_of`. vector: the
    elements by which rows of all tensors are aligned, 16, 8 or 1. split: slots of a part.
    """

    query: torch.dtype
    cache: torch.dtype
    head_dim: int
    exact: bool
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    block_m: int = BLOCK_M
    vector: int = 16
    split: int = SPLIT


def lanes_of(groups: int) -> int:
    """BLOCK_M for so many query heads per KV head."""
    return max(BLOCK_M, int(triton.next_power_of_2(groups)))


def padded_dim(head_dim: int) -> int:
    """Width of a tile of heads."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def attention_configuration(variant: Variant) -> Configuration:
    """The attention kernel as a launch compiles it."""
    wide = padded_dim(variant.head_dim)
    types = {name: _argument_type(name, variant) for name in attention_kernel.arg_names}
    constants = {
        "D": variant.head_dim,
        "D_PAD": wide,
        "BLOCK_M": variant.block_m,
        "BLOCK_N": _block_n(variant),
        "SPLIT": variant.split,
        "LANES": NUM_LANES if variant.exact else 0,
        "HAS_WINDOW": variant.window,
        "HAS_SOFTCAP": variant.softcap,
        "HAS_SINKS": variant.sinks,
        "CACHE": _CACHE_KINDS.get(variant.cache, 0),
        "WIDEN": bool(triton.knobs.runtime.interpret) and variant.query == torch.bfloat16,
        "VEC": variant.vector,
    }
    features = [name for name in ("window", "softcap", "sinks") if getattr(variant, name)]
    name = "-".join([
        "exact" if variant.exact else "fast", _CACHE_TYPES[variant.query],
        _CACHE_TYPES[variant.cache], str(variant.head_dim), *features,
    ])  # fmt: skip
    return Configuration(
        name=f"tree_attention/attention/{name}",
        kernel=attention_kernel,
        signature={n: t for n, t in types.items() if n not in constants},
        constants=constants,
        # Four warps would spill what they keep of fp32 operands.
        num_warps=4 if wide <= 64 and variant.query != torch.float32 else 8,
        num_stages=_num_stages(variant),
        needs_matrix=variant.query != torch.float32,
    )


def _block_n(variant: Variant) -> int:
    """Keys of a tile: 32, as longer ones spill, and so do longer ones than 16 of wide fp32."""
    is_wide = padded_dim(variant.head_dim) > 64 or variant.cache != variant.query
    return 16 if variant.query == torch.float32 and is_wide else 32


def _num_stages(variant: Variant) -> int:
    """Enough for three tiles of K and V on their way, where shared memory holds them.

    Two stages go to the block table and its pages, which tiles wait for.
    """
    if variant.query == torch.float32:
        return 2
    return 5 if padded_dim(variant.head_dim) <= 128 else 3


def merge_configuration(variant: Variant) -> Configuration:
    """The kernel that folds parts, for the same output."""
    constants = {
        "D": variant.head_dim,
        "D_PAD": padded_dim(variant.head_dim),
        "BLOCK_M": variant.block_m,
        "HEADS": MERGE_HEADS,
        "HAS_SINKS": variant.sinks,
        "VEC": variant.vector,
    }
    types = {name: _argument_type(name, variant) for name in merge_kernel.arg_names}
    sinks = "-sinks" if variant.sinks else ""
    return Configuration(
        name=f"tree_attention/merge/{QUERY_TYPES[variant.query]}-{variant.head_dim}{sinks}",
        kernel=merge_kernel,
        signature={n: t for n, t in types.items() if n not in constants},
        constants=constants,
        num_warps=4,
        num_stages=1,
        needs_matrix=False,
    )


def work_configurations(
    exact: bool, block_m: int = BLOCK_M, split: int = SPLIT
) -> tuple[Configuration, Configuration, Configuration]:
    """The kernels that make the work list, in the order in which they run."""
    lanes = NUM_LANES if exact else 0
    every: list[tuple[str, Any, dict[str, Any]]] = [
        (
            "exact-blocks" if exact else "fast-blocks",
            blocks_kernel,
            {"LANES": lanes, "BLOCK_M": block_m, "CHUNK": CHUNK},
        ),
        ("split", split_kernel, {"SPLIT": split, "CHUNK": CHUNK}),
        ("items", items_kernel, {"CHUNK": CHUNK}),
    ]
    made = [
        Configuration(
            name=f"tree_attention/work_list/{name}",
            kernel=kernel,
            signature={
                argument: _work_type(argument)
                for argument in kernel.arg_names
                if argument not in constants
            },
            constants=constants,
            num_warps=4,
            num_stages=1,
            needs_matrix=False,
        )
        for name, kernel, constants in every
    ]
    return made[0], made[1], made[2]


def _work_type(name: str) -> str:
    return "*i1" if name == "is_chain_ptr" else "*i32" if name.endswith("_ptr") else "i32"


def _argument_type(name: str, variant: Variant) -> str:
    if name in ("q_ptr", "out_ptr"):
        return f"*{QUERY_TYPES[variant.query]}"
    if name in ("k_ptr", "v_ptr"):
        return f"*{_CACHE_TYPES[variant.cache]}"
    if name.startswith("part_") or name in ("k_scales_ptr", "v_scales_ptr", "sinks_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return "*i32"
    return "i32" if name in RUNTIME_INTEGERS else "fp32"


_HEAD_DIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256)


def configurations() -> list[Configuration]:
    """Every shipped form of every kernel of tree attention."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    variants = [
        Variant(bf16, bf16, d, exact, vector=16 if d % 16 == 0 else 8)
        for d in _HEAD_DIMS
        for exact in (False, True)
    ]
    variants += [Variant(fp16, fp16, d, False) for d in (64, 128, 256)]
    variants += [Variant(fp32, fp32, d, exact) for d in (64, 128) for exact in (False, True)]
    variants += [Variant(fp32, fp32, 256, False)]
    for cache in _CACHE_KINDS:
        variants += [Variant(bf16, cache, d, exact) for d in (64, 128) for exact in (False, True)]
        variants += [Variant(fp16, cache, 128, False), Variant(fp32, cache, 64, False)]
    variants += [
        Variant(bf16, bf16, 64, False, window=True, sinks=True),
        Variant(bf16, bf16, 128, False, window=True),
        Variant(bf16, bf16, 256, False, window=True, softcap=True),
        Variant(bf16, bf16, 256, True, window=True, softcap=True, sinks=True),
    ]
    merged = [
        Variant(dtype, dtype, d, False, sinks=sinks)
        for dtype, d, sinks in [
            *((bf16, d, False) for d in _HEAD_DIMS),
            (fp16, 128, False), (fp32, 64, False), (fp32, 256, False), (bf16, 64, True),
        ]
    ]  # fmt: skip
    work = [*work_configurations(False), work_configurations(True)[0]]
    return [
        *map(attention_configuration, variants),
        *map(merge_configuration, merged),
        *work,
    ]
