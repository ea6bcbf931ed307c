"""One forward of the target over the flat rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec.cache import KVStore, LayerShape
from specdec.model.discover import discover
from specdec.model.mixing import find_mixing, ignores_positions
from specdec.model.packed import can_pack, pack_linears
from specdec.model.skeleton import run_rows
from specdec.step import FlatBatch
from specdec_kernels import (
    TreeAttentionPlan,
    cache_dtype,
    plan_tree_attention,
    tree_attention,
    write_kv,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TargetRunner:
    """Runs the target model's own module over prompt chunks, single nodes and trees alike.

    layers: KV shape of every attention layer, found by a forward of one token. vocab_size: length
    of a logits row. windows: the sliding windows that layers have. has_softcap: whether any layer
    caps its scores. kv_dtype: of the KV tensors, which are made by allocate().

    Raises ModelError, with the reason, if trees cannot be scored with the model.
    """

    def __init__(self, model: PreTrainedModel, attention: str = "auto") -> None:
        found = discover(model)
        self._module, self._hook = found.skeleton, found.hook
        self._attention: Any = attention
        self.device = model.device
        self.dtype = model.dtype
        self.kv_dtype = cache_dtype(model.dtype, model.device)
        self.vocab_size = found.vocab_size
        self.layers = [LayerShape(layer.num_kv_heads, layer.head_dim) for layer in found.layers]
        self.windows = {layer.window for layer in found.layers if layer.window is not None}
        self.has_softcap = any(layer.softcap is not None for layer in found.layers)
        self._kv: KVStore | None = None
        self._plan: TreeAttentionPlan | None = None
        self._batch: FlatBatch | None = None

    @property
    def kv(self) -> KVStore:
        """The KV tensors. Raises if allocate() has not been called."""
        assert self._kv is not None
        return self._kv

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of KV of one token in all layers."""
        return sum(layer.bytes_per_slot(self.kv_dtype) for layer in self.layers)

    def pack(self) -> list[torch.nn.Linear]:
        """Lay linear weights out for few rows where that pays; returns the layers replaced."""
        return pack_linears(self._module) if can_pack(self._module) else []

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Make the KV tensors, replacing any that there were."""
        self._kv = KVStore(self.layers, num_pages, page_size, self.kv_dtype, self.device)

    @torch.inference_mode()
    def score(self, batch: FlatBatch) -> torch.Tensor:
        """Write the KV of all rows and return the logits of the judged ones, [J, V].

        J may be 0: nothing but KV is wanted. Mutates the KV store at the batch's slots.
        """
        self._plan = plan_tree_attention(batch.trees, impl=self._attention)
        self._batch = batch
        return run_rows(
            self._module,
            self._hook,
            batch.token_ids,
            batch.trees.positions,
            batch.judged_rows,
            self._paged_attention,
        )

    def explain(self) -> str:
        """Why logits of flat rows may differ from the stock module's, found by experiment."""
        mixing = find_mixing(self._module, self._hook)
        if mixing is not None:
            return mixing
        if ignores_positions(self._module, self._hook):
            return "it ignores the positions that rows are given"
        return "its attention, positions or mask do not follow the rows"

    def _paged_attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self._batch is not None
        assert self._plan is not None
        keys, values = self.kv.layer(layer)
        dtype = query.dtype
        write_kv(key, value, keys, values, self._batch.trees.slots)
        out = tree_attention(
            query.to(self.kv_dtype),
            keys,
            values,
            self._plan,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return out.to(dtype)


def flat_batch(
    token_ids: Sequence[int], trees: Any, judged_rows: Sequence[int], device: torch.device
) -> FlatBatch:
    """A FlatBatch from host lists."""
    return FlatBatch(
        torch.tensor(token_ids, dtype=torch.int64, device=device),
        trees,
        torch.tensor(judged_rows, dtype=torch.int64, device=device),
    )
