"""Compiles the kernels for GPUs that need not be there; `test_triton.py` runs this file.

    python compiled_triton.py BACKEND ARCH WARP_SIZE NUM_SHAPES

NUM_SHAPES limits how many shapes of the attention kernel are compiled, in the order below; 0: all.
Prints one line of JSON per kernel: name, dtype, bytes of shared memory, bytes of the binary.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec_kernels.tree_attention.triton import block_sizes, tree_attention_kernel
from specdec_kernels.write_kv.triton import write_kv_kernel

INTEGERS = ("committed", "block_", "cu_nodes", "tables", "depths")


def argument_type(name: str, dtype: str) -> str:
    if name in ("ancestors_ptr", "slots_ptr"):
        return "*i64"
    if name == "is_chain_ptr":
        return "*i1"
    if name.endswith("_ptr"):
        return "*i32" if name.startswith(INTEGERS) else f"*{dtype}"
    return "fp32" if name in ("scale", "softcap") else "i32"


def compile_kernel(kernel: Any, constants: dict[str, Any], dtype: str, target: GPUTarget) -> None:
    signature = {
        name: "constexpr" if name in constants else argument_type(name, dtype)
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=target)
    binary = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
    print(json.dumps([kernel.__name__, dtype, compiled.metadata.shared, len(binary)]))


# dtype, query heads per KV head, head_dim, what the layer has; GPT-OSS second, then worst cases and
# every other head_dim
SHAPES = [
    ("bf16", 3, 64, ""),
    ("bf16", 8, 64, "WINDOW SINKS"),
    ("fp16", 40, 72, "WINDOW SOFTCAP"),
    ("fp32", 3, 64, ""),
    ("bf16", 8, 256, "WINDOW SOFTCAP SINKS"),
    ("fp32", 2, 256, "SINKS"),
    *(("fp16", 3, head_dim, "") for head_dim in (80, 96, 112, 128, 160, 192)),
]


def main(target: GPUTarget, num_shapes: int) -> None:
    for dtype, groups, head_dim, features in SHAPES[: num_shapes or None]:
        rows, block_m, block_n = block_sizes(groups, head_dim, 16, 4 if dtype == "fp32" else 2)
        constants = {
            "G": groups, "D": head_dim, "D_PAD": triton.next_power_of_2(head_dim),
            "PAGE_SIZE": 16, "NUM_WORDS": 1, "ROWS": rows, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "WIDEN": False,
        }  # fmt: skip
        for name in ("WINDOW", "SOFTCAP", "SINKS"):
            constants[f"HAS_{name}"] = name in features
        compile_kernel(tree_attention_kernel, constants, dtype, target)
    compile_kernel(write_kv_kernel, {"HEADS": 3, "D": 80, "BLOCK": 256}, "bf16", target)


if __name__ == "__main__":
    backend, arch, warp_size, num_shapes = sys.argv[1:]
    architecture = int(arch) if arch.isdigit() else arch
    main(GPUTarget(backend, architecture, int(warp_size)), int(num_shapes))
