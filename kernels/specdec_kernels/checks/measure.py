"""Compiles one configuration for one GPU, which need not be there, and reads what came out.

Imports Triton. What a thread keeps comes from the binary itself: for NVIDIA from the `cuobjdump`
that Triton brings along, for AMD from the metadata of the assembly.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec_kernels.configuration import Configuration

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_MATRIX = {
    "ptx": re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"),
    "amdgcn": re.compile(r"\bv_mfma_"),
}


class Measured(NamedTuple):
    """What one configuration takes on one target.

    registers: of a thread. spills: bytes of a thread's stack in memory, where registers go that do
    not fit; scalar registers that AMD's compiler keeps in lanes of vector registers are none.
    shared: bytes of a program. matrix: number of matrix instructions in the code.
    """

    registers: int
    spills: int
    shared: int
    matrix: int


def compile_and_measure(configuration: Configuration, target: str) -> Measured:
    """Compiles ahead of time and reads the result; whatever Triton raises passes through."""
    compiled = compile_for(configuration, TARGETS[target])
    shared = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        registers, spills = _cubin_usage(compiled.asm["cubin"])
        matrix = len(_MATRIX["ptx"].findall(compiled.asm["ptx"]))
    else:
        assembly = compiled.asm["amdgcn"]
        registers = _amd_figure(assembly, "vgpr_count")
        spills = _amd_figure(assembly, "private_segment_fixed_size")
        shared = max(shared, _amd_figure(assembly, "group_segment_fixed_size"))
        matrix = len(_MATRIX["amdgcn"].findall(assembly))
    return Measured(registers, spills, shared, matrix)


def compile_for(configuration: Configuration, target: GPUTarget) -> Any:
    """The compiled kernel, from Triton's cache if it is there."""
    kernel, constants = configuration.kernel, configuration.constants
    unknown = (constants.keys() | configuration.signature.keys()) - set(kernel.arg_names)
    missing = set(kernel.arg_names) - constants.keys() - configuration.signature.keys()
    if unknown or missing:
        raise ValueError(
            f"{configuration.name}: signature and constants must name every argument of "
            f"{kernel.__name__} and no other; missing {sorted(missing)}, unknown {sorted(unknown)}"
        )
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind, _, divisor = configuration.signature[name].partition(":")
        signature[name] = kind
        if kind.startswith("*") or divisor == "16":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    return triton.compile(source, target=target, options=options)


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"{command[0]} names no registers: {done.stdout}{done.stderr}")
    return int(found[1]), int(found[2])


def _amd_figure(assembly: str, name: str) -> int:
    found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the metadata of the assembly lacks .{name}")
    return int(found[1])


@cache
def configurations_of(module: str) -> dict[str, Configuration]:
    """The shipped configurations of one operation's Triton module, by name."""
    shipped: list[Configuration] = importlib.import_module(module).configurations()
    named = {configuration.name: configuration for configuration in shipped}
    if len(named) < len(shipped):
        raise ValueError(f"{module}: two configurations have one name")
    return named
