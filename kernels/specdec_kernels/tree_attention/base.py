"""What every form of tree attention offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from specdec_kernels.batch import TreeBatch

Layout = Literal["fast", "exact"]

SPLIT = 512
"""Slots of a part: the committed context is cut at absolute multiples of this, in every form."""

NUM_LANES = 16
"""W of the exact layout: the nearest positions of a row, its own included, read one by one."""


class LayerOptions(NamedTuple):
    """What differs from layer to layer beside the tensors; see `tree_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def check_exact(batch: TreeBatch) -> None:
    """Raises ValueError naming the request if the exact layout cannot read one of the trees."""
    for request, longest in enumerate(batch.private_nodes_host):
        if longest > NUM_LANES:
            raise ValueError(
                f"batch: request {request} has a branch of {longest} nodes off its principal path, "
                f"the exact layout reads at most {NUM_LANES}; cut the tree"
            )


class TreeAttentionPlan(ABC):
    """Everything about one step that does not depend on the layer; made once, used per layer."""

    impl: ClassVar[str]

    def __init__(self, batch: TreeBatch, layout: Layout) -> None:
        self.batch = batch
        self.layout = layout
        self.num_rows = batch.num_rows
        self.num_pages_needed = 1 + max(
            (max(table) for table in batch.block_tables_host if table), default=-1
        )

    @abstractmethod
    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: LayerOptions
    ) -> Tensor:
        """Attention of one layer; the arguments have passed `tree_attention`'s checks."""
