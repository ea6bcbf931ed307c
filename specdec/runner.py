"""One forward of the target over the flat rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdec.cache import KVStore, LayerShape
from specdec.errors import ModelError
from specdec.model.packed import can_pack, pack_linears
from specdec.model.skeleton import make_skeleton
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
    of a logits row. windows: the sliding windows seen. kv_dtype: of the KV tensors, which are made
    by allocate().

    Raises ModelError if the model's attention does not call ours once a layer.
    """

    def __init__(self, model: PreTrainedModel, attention: str = "auto") -> None:
        self._module, self._hook = make_skeleton(model)
        self._attention: Any = attention
        self._name = type(model).__name__
        self.device = model.device
        self.dtype = model.dtype
        self.kv_dtype = cache_dtype(model.dtype, model.device)
        self.windows: set[int] = set()
        self.layers: list[LayerShape] = []
        self.vocab_size = 0
        self._kv: KVStore | None = None
        self._plan: TreeAttentionPlan | None = None
        self._batch: FlatBatch | None = None
        self._discover()

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
        return self._forward(
            batch.token_ids, batch.trees.positions, batch.judged_rows, self._paged_attention
        )

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Any
    ) -> torch.Tensor:
        self._hook.attend = attend
        try:
            output = self._module(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=rows,
            )
        finally:
            self._hook.attend = None
        logits: torch.Tensor = output.logits[0]
        return logits

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
    ) -> torch.Tensor:
        assert self._batch is not None
        assert self._plan is not None
        keys, values = self.kv.layer(layer)
        dtype = query.dtype
        key, value, query = (part.to(self.kv_dtype) for part in (key, value, query))
        write_kv(key, value, keys, values, self._batch.trees.slots)
        out = tree_attention(
            query, keys, values, self._plan, scale=scale, window=window, softcap=softcap
        )
        return out.to(dtype)

    @torch.inference_mode()
    def _discover(self) -> None:
        """Learn the layers' shapes from a forward of one token, which attends to itself only."""
        seen: dict[int, LayerShape] = {}
        calls: list[int] = []

        def attend(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *,
            window: int | None,
            **_: Any,
        ) -> torch.Tensor:
            if key.shape != value.shape:
                raise ModelError(
                    f"{self._name} has keys of {key.shape[-1]} and values of {value.shape[-1]} "
                    "dimensions (latent attention), which is not supported"
                )
            calls.append(layer)
            seen[layer] = LayerShape(key.shape[1], key.shape[2])
            if window is not None:
                self.windows.add(window)
            return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        logits = self._forward(row, row, row, attend)
        expected = self._num_decoder_layers()
        if sorted(calls) != list(range(expected)):
            raise ModelError(
                f"{self._name} called the attention interface for layers {sorted(calls)}, but it "
                f"has {expected} decoder layers; its attention cannot score trees"
            )
        self.layers = [seen[layer] for layer in range(expected)]
        self.vocab_size = int(logits.shape[-1])

    def _num_decoder_layers(self) -> int:
        config = self._module.config.get_text_config(decoder=True)
        return int(config.num_hidden_layers)


def flat_batch(
    token_ids: Sequence[int], trees: Any, judged_rows: Sequence[int], device: torch.device
) -> FlatBatch:
    """A FlatBatch from host lists."""
    return FlatBatch(
        torch.tensor(token_ids, dtype=torch.int64, device=device),
        trees,
        torch.tensor(judged_rows, dtype=torch.int64, device=device),
    )
