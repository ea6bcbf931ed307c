"""The forms of tree attention by name, those that `impl` does not reach alone included."""

from __future__ import annotations

from torch import Tensor

from specdec_kernels import TreeAttentionPlan, TreeBatch, plan_tree_attention
from specdec_kernels.tree_attention.base import NUM_LANES
from specdec_kernels.tree_attention.cpu_torch import TorchPlan
from specdec_kernels.tree_attention.exact import ExactPlan

CPU_FORMS = ["reference", "exact", "torch", "cpu"]
"""`exact` is the exact layout in torch; `torch` is the fallback of `cpu`, which is compiled."""


def make_plan(batch: TreeBatch, form: str) -> TreeAttentionPlan:
    """A plan of the form; "triton-exact" is Triton's in the exact layout."""
    if form == "torch":
        return TorchPlan(batch, "fast")
    if form == "exact":
        return plan_tree_attention(batch, impl="reference", layout="exact")
    if form == "triton-exact":
        return plan_tree_attention(batch, impl="triton", layout="exact")
    plan = plan_tree_attention(batch, impl=form)  # type: ignore[arg-type]
    assert plan.impl == form
    return plan


def can_run(batch: TreeBatch, form: str, key_scales: Tensor | None = None) -> bool:
    """Exact layouts read short branches only, and the torch fallback floating caches only."""
    if form in ("exact", "triton-exact"):
        return max(batch.private_nodes_host, default=0) <= NUM_LANES
    return form != "torch" or key_scales is None


__all__ = ["CPU_FORMS", "ExactPlan", "TorchPlan", "can_run", "make_plan"]
