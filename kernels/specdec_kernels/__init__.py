"""Operations on tensors for speculative decoding over token trees and a paged KV cache."""

from specdec_kernels.accept.api import accept
from specdec_kernels.batch import TreeBatch
from specdec_kernels.compact_kv.api import compact_kv, compact_paths, copy_pages
from specdec_kernels.quantise import dequantise, quantise
from specdec_kernels.sample.api import sample
from specdec_kernels.tree_attention.api import cache_dtype, plan_tree_attention, tree_attention
from specdec_kernels.tree_attention.base import TreeAttentionPlan
from specdec_kernels.tree_layout.api import tree_layout
from specdec_kernels.tree_layout.device import DeviceLayout, layout_trees
from specdec_kernels.write_kv.api import write_kv

__all__ = [
    "DeviceLayout",
    "TreeAttentionPlan",
    "TreeBatch",
    "accept",
    "cache_dtype",
    "compact_kv",
    "compact_paths",
    "copy_pages",
    "dequantise",
    "layout_trees",
    "plan_tree_attention",
    "quantise",
    "sample",
    "tree_attention",
    "tree_layout",
    "write_kv",
]
