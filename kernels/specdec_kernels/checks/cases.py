"""What a case of the GPU check is given, and how it reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from specdec_kernels.dispatch import Impl


class SkippedError(Exception):
    """The case cannot run here; the text says why."""


class Setting(NamedTuple):
    """Where the cases run. tiny: shapes that Triton's interpreter gets through in seconds."""

    device: torch.device
    tiny: bool
    impl: Impl = "triton"


class Case(NamedTuple):
    """A name "group/what", and what returns figures, or raises AssertionError or SkippedError."""

    name: str
    run: Callable[[Setting], dict[str, Any]]


def require(holds: bool, text: str) -> None:
    """Raises AssertionError with the text, with python -O too."""
    if not holds:
        raise AssertionError(text)


def all_cases(tiny: bool) -> list[Case]:
    """Every case in the order of a run: correctness, equality of bits, times."""
    from specdec_kernels.checks import bits, correct, timing, timing_ops

    return [*correct.cases(tiny), *bits.cases(tiny), *timing_ops.cases(tiny), *timing.cases(tiny)]
