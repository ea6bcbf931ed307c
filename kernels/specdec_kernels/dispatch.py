"""Which form of an operation runs where: one table, filled with names so that nothing is imported.

A form is looked up as "module:attribute" and imported when it is chosen. Importing this package
therefore never imports Triton, and a machine without Triton lacks nothing but that form.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch

Impl = Literal["auto", "reference", "cpu", "triton"]

_FORMS: dict[str, dict[str, str]] = {
    "tree_attention": {
        "reference": "specdec_kernels.tree_attention.exact:plain_plan",
        "cpu": "specdec_kernels.tree_attention.cpu:CpuPlan",
        "triton": "specdec_kernels.tree_attention.triton_plan:TritonPlan",
    },
    "write_kv": {
        "reference": "specdec_kernels.write_kv.reference:reference_write_kv",
        "cpu": "specdec_kernels.write_kv.cpu:cpu_write_kv",
        "triton": "specdec_kernels.write_kv.triton:triton_write_kv",
    },
    "compact_kv": {
        "reference": "specdec_kernels.compact_kv.reference:reference_move",
        "triton": "specdec_kernels.compact_kv.triton:triton_move",
    },
    "compact_paths": {
        "reference": "specdec_kernels.compact_kv.reference:reference_compact_paths",
        "triton": "specdec_kernels.compact_kv.triton:triton_compact_paths",
    },
    "layout_trees": {
        "reference": "specdec_kernels.tree_layout.reference:reference_layout",
        "triton": "specdec_kernels.tree_layout.triton:triton_layout",
    },
    "sample": {
        "reference": "specdec_kernels.sample.rows:reference_sample",
        "triton": "specdec_kernels.sample.triton:triton_sample",
    },
    "accept": {
        "reference": "specdec_kernels.accept.reference:reference_accept",
        "triton": "specdec_kernels.accept.triton:triton_accept",
    },
}


def choose(operation: str, impl: Impl, device: torch.device) -> Any:
    """The callable that computes `operation` for tensors on `device`.

    impl: "auto" takes "triton" on CUDA devices where Triton is installed, "cpu" on the CPU where
    the operation has such a form, and "reference", which is plain torch and runs everywhere,
    otherwise. "triton" on the CPU is for Triton's interpreter.

    Raises ValueError if impl is unknown, or the operation has no such form, or not on this device.
    """
    if impl not in get_args(Impl):
        names = ", ".join(f'"{name}"' for name in get_args(Impl))
        raise ValueError(f"impl: must be one of {names}, got {impl!r}")
    forms = _FORMS[operation]
    if impl == "auto":
        wanted = "cpu" if device.type == "cpu" else "triton" if device.type == "cuda" else ""
        available = wanted in forms and (wanted != "triton" or _has_triton())
        impl = wanted if available else "reference"  # type: ignore[assignment]
    if impl not in forms:
        names = ", ".join(f'"{name}"' for name in forms)
        raise ValueError(f'impl: {operation} has no form "{impl}"; it has {names}')
    if impl == "cpu" and device.type != "cpu":
        raise ValueError(f'impl: "cpu" needs tensors on the CPU, these are on {device.type}')
    if impl == "triton":
        _check_triton(device)
    return load(forms[impl])


def load(name: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _check_triton(device: torch.device) -> None:
    if not _has_triton():
        raise ValueError('impl: "triton" needs the triton package; install it or use "reference"')
    import triton

    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ValueError(
            'impl: "triton" needs tensors on a GPU; on the CPU set TRITON_INTERPRET=1 before '
            "Python starts"
        )
