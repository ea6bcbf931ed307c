"""Parents of a tree -> depths and ancestor sets."""

from specdec_kernels.tree_layout.api import (
    MAX_TREE_NODES,
    TreeLayout,
    principal_path_length,
    tree_layout,
)

__all__ = ["MAX_TREE_NODES", "TreeLayout", "principal_path_length", "tree_layout"]
