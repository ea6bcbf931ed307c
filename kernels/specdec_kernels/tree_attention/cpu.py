"""Tree attention on the CPU: compiled where there is a compiler, torch otherwise."""

from __future__ import annotations

import logging
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.compiled import CompileError
from specdec_kernels.tree_attention.base import LayerOptions, Layout, TreeAttentionPlan
from specdec_kernels.tree_attention.cpu_torch import NATIVE_DTYPES, TorchPlan
from specdec_kernels.tree_attention.exact import plain_plan
from specdec_kernels.tree_attention.native import NativePlan, supports

logger = logging.getLogger(__name__)


@cache
def compile_problem() -> str | None:
    """Why the compiled form cannot be used on this machine, None if it can; logged once."""
    try:
        NativePlan(TreeBatch.from_lists([], [], [], 1), "fast")
    except CompileError as error:
        logger.warning("Tree attention runs in torch, which is slower: %s", error)
        return str(error)
    return None


def is_compiled() -> bool:
    """Whether the compiled form can be used on this machine."""
    return compile_problem() is None


class CpuPlan(TreeAttentionPlan):
    """Takes the compiled form for what it supports, a torch form made on demand for the rest."""

    impl: ClassVar[str] = "cpu"

    def __init__(self, batch: TreeBatch, layout: Layout) -> None:
        super().__init__(batch, layout)
        self._native = NativePlan(batch, layout) if is_compiled() else None
        self._torch: TorchPlan | None = None

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: LayerOptions
    ) -> Tensor:
        if self._native is not None and supports(query, key_cache):
            return self._native.run(query, key_cache, value_cache, options)
        if self.layout == "exact" or options.key_scales is not None:
            return plain_plan(self.batch, self.layout).run(query, key_cache, value_cache, options)
        if self._torch is None:
            self._torch = TorchPlan(self.batch, self.layout)
        return self._torch.run(query, key_cache, value_cache, options)


def best_cache_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which keys and values of a model of `dtype` are best kept.

    The compiled form converts while it reads, so there it is the model's own. In torch it is fp32
    where attention is computed in fp32 whatever the model's dtype, which is every CPU without bf16
    tiles: the values are the same, and no step converts the whole context again.
    """
    if is_compiled() or dtype.itemsize >= 4 or dtype in NATIVE_DTYPES:
        return dtype
    return torch.float32
