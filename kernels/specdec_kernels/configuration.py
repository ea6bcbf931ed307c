"""One compiled form of a Triton kernel, described without importing Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """One kernel with the types and constants that a launch fixes when it is compiled.

    Launches and the ahead-of-time gate read the same object, so what the gate compiled is what a
    server runs.
    """

    name: str
    """Unique over all operations: ``operation/kernel/what-varies``. The gate's table is keyed
    by it."""

    kernel: Any
    """The ``triton.jit`` function."""

    signature: dict[str, str]
    """Type of every run-time argument by its name, in Triton's spelling: ``*bf16``, ``*i32``,
    ``i32``, ``fp32``. An argument that is in `constants` needs no entry. Pointers are taken to be
    aligned to 16 bytes, as torch allocates; ``i32:16`` is an integer that a launch finds divisible
    by 16, such as the stride of a page."""

    constants: dict[str, Any]
    """Value of every ``tl.constexpr`` argument by its name."""

    num_warps: int
    """Groups of 32 threads (64 on AMD) in one program."""

    num_stages: int
    """Depth of the pipeline that the compiler makes of loads in a loop."""

    needs_matrix: bool
    """Whether the compiled code must hold a matrix instruction on every target."""
