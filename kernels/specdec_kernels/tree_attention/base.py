"""What every form of tree attention offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from specdec_kernels.batch import TreeBatch


class TreeAttentionPlan(ABC):
    """Everything about one step that does not depend on the layer; made once, used per layer."""

    impl: ClassVar[str]

    def __init__(self, batch: TreeBatch) -> None:
        self.batch = batch
        self.num_rows = batch.num_rows
        self.num_pages_needed = 1 + max(
            (max(table) for table in batch.block_tables_host if table), default=-1
        )

    @abstractmethod
    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one layer; the arguments have passed `tree_attention`'s checks."""
