"""Entry points of tree attention: planning, validation and choice of form."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_attention.base import TreeAttentionPlan
from specdec_kernels.tree_attention.cpu import NATIVE_DTYPES, CpuPlan
from specdec_kernels.tree_attention.reference import ReferencePlan

Impl = Literal["auto", "reference", "cpu", "triton"]


def plan_tree_attention(batch: TreeBatch, *, impl: Impl = "auto") -> TreeAttentionPlan:
    """Prepares one step's attention; do this once per step and reuse it in every layer.

    impl: "auto" takes "cpu" for tensors on the CPU, "triton" on CUDA devices and "reference" on
    any other; "reference" is plain torch and runs everywhere.

    Raises ValueError for an unknown impl, or for "cpu" when the batch is not on the CPU.
    """
    kind = batch.device.type
    if impl == "auto":
        impl = "cpu" if kind == "cpu" else "triton" if kind == "cuda" else "reference"
    if impl == "reference":
        return ReferencePlan(batch)
    if impl == "cpu":
        if kind != "cpu":
            raise ValueError(f'impl: "cpu" needs a batch on the CPU, this one is on {kind}')
        return CpuPlan(batch)
    if impl == "triton":
        from specdec_kernels.tree_attention.triton import TritonPlan

        return TritonPlan(batch)
    raise ValueError(f'impl: must be "auto", "reference", "cpu" or "triton", got {impl!r}')


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which keys and values of a model of `dtype` are best kept on `device`.

    fp32 where attention is computed in fp32 whatever the model's dtype, which is every CPU without
    bf16 tiles: the values are the same, and no step converts the whole context again.
    """
    if device.type == "cpu" and dtype.itemsize < 4 and dtype not in NATIVE_DTYPES:
        return torch.float32
    return dtype


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: TreeAttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every row over its request's committed tokens and its own ancestors.

    query: [S, Hq, D]. key_cache, value_cache: [num_pages, page_size, Hkv, D] of the query's dtype,
    Hq a multiple of Hkv; the rows' own keys and values have been written already (`write_kv`).
    sinks: [Hq], of any floating dtype. Returns [S, Hq, D], contiguous, dtype of the query, without
    gradients; no argument is changed.

    A row at logical position P = L + depth sees the committed slots 0..L-1 and its ancestor nodes
    including itself. With a window w it sees only those whose logical position is above P - w, as
    in transformers' `sliding_window_overlay`.

    Scores are `scale * q.k`; softcap c then maps a score s to c * tanh(s / c); then what a row may
    not see is masked; last, the sink of the query head joins the softmax as one more score, neither
    scaled nor capped, and its weight is dropped, so that the weights of a row sum to less than 1
    (transformers' GPT-OSS `eager_attention_forward`). The softmax is computed in fp32 or better.
    Slots of other requests, free pages and the unused tail of a last page are never read into the
    result, whatever they hold.

    Raises ValueError naming the argument if shapes, dtypes, devices or sizes disagree.
    """
    _check(query, key_cache, value_cache, plan)
    if window is not None and window < 1:
        raise ValueError(f"window: must be at least 1 or None, got {window}")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap: must be positive and finite or None, got {softcap}")
    if sinks is not None:
        _check_sinks(sinks, query)
        sinks = sinks.detach()
    return plan.run(query.detach(), key_cache, value_cache, scale, window, softcap, sinks)


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    if sinks.shape != query.shape[1:2] or not sinks.is_floating_point():
        raise ValueError(
            f"sinks: must be [Hq = {query.shape[1]}] of a floating dtype or None, got "
            f"{tuple(sinks.shape)} of {sinks.dtype}"
        )
    if sinks.device != query.device:
        raise ValueError(f"sinks: must be on the query's device {query.device}, got {sinks.device}")


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: TreeAttentionPlan) -> None:
    if query.dim() != 3 or query.shape[0] != plan.num_rows:
        raise ValueError(
            f"query: must be [S = {plan.num_rows}, Hq, D] for this plan, got {tuple(query.shape)}"
        )
    if key_cache.dim() != 4 or key_cache.shape != value_cache.shape:
        raise ValueError(
            "key_cache and value_cache: must have one shape [num_pages, page_size, Hkv, D], got "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    num_pages, page_size, num_kv_heads, head_dim = key_cache.shape
    if page_size != plan.batch.page_size:
        raise ValueError(
            f"key_cache: its page size is {page_size}, the batch was built for "
            f"{plan.batch.page_size}"
        )
    if num_pages < plan.num_pages_needed:
        raise ValueError(
            f"key_cache: it has {num_pages} pages, but a block table names page "
            f"{plan.num_pages_needed - 1}"
        )
    if query.shape[2] != head_dim or query.shape[1] % num_kv_heads:
        raise ValueError(
            f"query: {query.shape[1]} heads of {query.shape[2]} do not fit the cache's "
            f"{num_kv_heads} heads of {head_dim}; Hq must be a multiple of Hkv and D equal"
        )
    if not query.dtype == key_cache.dtype == value_cache.dtype or not query.is_floating_point():
        raise ValueError(
            "query, key_cache and value_cache: must have one floating dtype, got "
            f"{query.dtype}, {key_cache.dtype} and {value_cache.dtype}"
        )
    if not query.device == key_cache.device == value_cache.device == plan.batch.device:
        raise ValueError(
            f"query, key_cache, value_cache and plan: must be on one device, got {query.device}, "
            f"{key_cache.device}, {value_cache.device} and {plan.batch.device}"
        )
