"""Speculative decoding over token trees and a paged KV cache; the output is the target's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.grammar import Grammar
    from specdec.llm import LLM
    from specdec.output import RequestOutput
    from specdec.request import FinishReason, SamplingParams, Speculation

__version__ = "0.1.0"

_WHERE = {
    "LLM": "specdec.llm",
    "FinishReason": "specdec.request",
    "Grammar": "specdec.grammar",
    "RequestOutput": "specdec.output",
    "SamplingParams": "specdec.request",
    "Speculation": "specdec.request",
}

__all__ = [
    "LLM",
    "FinishReason",
    "Grammar",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: `import specdec` stays fast."""
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")
