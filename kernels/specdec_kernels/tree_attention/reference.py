"""The meaning of tree attention, in plain torch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_attention.base import LayerOptions, TreeAttentionPlan
from specdec_kernels.tree_attention.masks import visible


def reference_tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: TreeBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    upcast: bool = True,
) -> Tensor:
    """As `tree_attention`, one request after the other.

    upcast: compute in fp32 (fp64 if the inputs are fp64); otherwise in the inputs' own dtype.
    """
    dtype = query.dtype
    if upcast and dtype != torch.float64:
        dtype = torch.float32
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    groups = query.shape[1] // key_cache.shape[2]
    for request, table in enumerate(batch.block_tables_host):
        start, end = batch.cu_nodes_host[request : request + 2]
        if start == end:
            continue
        length = batch.committed_lens_host[request] + end - start
        logical = torch.arange(length, device=query.device)
        pages = torch.tensor(table, device=query.device)[logical // batch.page_size]
        offsets = logical % batch.page_size
        keys = key_cache[pages, offsets].to(dtype)
        values = value_cache[pages, offsets].to(dtype)
        if key_scales is not None and value_scales is not None:
            keys = keys * key_scales[pages, offsets].to(dtype).unsqueeze(-1)
            values = values * value_scales[pages, offsets].to(dtype).unsqueeze(-1)
        keys, values = (t.repeat_interleave(groups, dim=1) for t in (keys, values))
        scores = torch.einsum("shd,nhd->hsn", query[start:end].to(dtype), keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible(batch, request, window), float("-inf"))
        if sinks is not None:
            column = sinks.to(dtype).view(-1, 1, 1).expand(-1, end - start, 1)
            scores = torch.cat([scores, column], dim=-1)
        probs = torch.softmax(scores, dim=-1)[..., :length]
        out[start:end] = torch.einsum("hsn,nhd->shd", probs, values).to(query.dtype)
    return out


class ReferencePlan(TreeAttentionPlan):
    """Keeps nothing: the reference looks everything up again."""

    impl: ClassVar[str] = "reference"

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: LayerOptions
    ) -> Tensor:
        return reference_tree_attention(
            query, key_cache, value_cache, self.batch, **options._asdict()
        )
