"""Attention of ragged token trees over a paged KV cache."""

from specdec_kernels.tree_attention.api import plan_tree_attention, tree_attention
from specdec_kernels.tree_attention.base import TreeAttentionPlan

__all__ = ["TreeAttentionPlan", "plan_tree_attention", "tree_attention"]
