"""Entry points of tree attention: planning, validation and choice of form."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.dispatch import Impl, choose
from specdec_kernels.quantise import LIMITS, check_scales
from specdec_kernels.tree_attention.base import (
    LayerOptions,
    Layout,
    TreeAttentionPlan,
    check_exact,
)
from specdec_kernels.tree_attention.cpu import best_cache_dtype


def plan_tree_attention(
    batch: TreeBatch, *, impl: Impl = "auto", layout: Layout = "fast"
) -> TreeAttentionPlan:
    """Prepares one step's attention; do this once per step and reuse it in every layer.

    impl: see `specdec_kernels.dispatch.choose`. layout: "fast" reads a tree's nodes as they are
    stored; "exact" reads keys in an order that depends on the row's position alone, so that a row
    scored in a tree has the bits of the same row decoded after its ancestors were committed.

    Raises ValueError for an unknown impl or layout, an impl that does not run where the batch is,
    or, in the exact layout, a node with more than NUM_LANES - 1 ancestors off the principal path.
    """
    if layout not in ("fast", "exact"):
        raise ValueError(f'layout: must be "fast" or "exact", got {layout!r}')
    if layout == "exact":
        check_exact(batch)
    plan = choose("tree_attention", impl, batch.device)(batch, layout)
    return cast("TreeAttentionPlan", plan)


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which keys and values of a model of `dtype` are best kept on `device`."""
    return best_cache_dtype(dtype) if device.type == "cpu" else dtype


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
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Attention of every row over its request's committed tokens and its own ancestors.

    query: [S, Hq, D], D a multiple of 8 up to 256 or any D in the reference. key_cache,
    value_cache: [num_pages, page_size, Hkv, D] of the query's dtype, Hq a multiple of Hkv; or int8
    or float8_e4m3fn with key_scales, value_scales: fp32 [num_pages, page_size, Hkv], an element
    being worth its number times its token's and head's scale. The rows' own keys and values have
    been written already (`write_kv`). sinks: [Hq], of any floating dtype. Returns [S, Hq, D],
    contiguous, dtype of the query, without gradients; no argument is changed.

    A row at logical position P = L + depth sees the committed slots 0..L-1 and its ancestor nodes
    including itself. With a window w it sees only those whose logical position is above P - w, as
    in transformers' `sliding_window_overlay`.

    Scores are `scale * q.k`; softcap c then maps a score s to c * tanh(s / c); then what a row may
    not see is masked; last, the sink of the query head joins the softmax as one more score, neither
    scaled nor capped, and its weight is dropped, so that the weights of a row sum to less than 1
    (transformers' GPT-OSS `eager_attention_forward`). The softmax is computed in fp32 or better.
    Slots of other requests, free pages and the unused tail of a last page are never read into the
    result, whatever they hold.

    Raises ValueError naming the argument if shapes, dtypes, devices or sizes disagree, or the form
    that was planned does not compute them.
    """
    _check(query, key_cache, value_cache, plan)
    check_scales(key_cache, key_scales, value_scales)
    if window is not None and window < 1:
        raise ValueError(f"window: must be at least 1 or None, got {window}")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap: must be positive and finite or None, got {softcap}")
    if sinks is not None:
        _check_sinks(sinks, query)
        sinks = sinks.detach()
    options = LayerOptions(scale, window, softcap, sinks, key_scales, value_scales)
    return plan.run(query.detach(), key_cache, value_cache, options)


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
    dtypes = (query.dtype, *LIMITS)
    if (
        not query.is_floating_point()
        or key_cache.dtype != value_cache.dtype
        or key_cache.dtype not in dtypes
    ):
        raise ValueError(
            "query, key_cache and value_cache: must have one floating dtype, or both caches int8 "
            f"or float8_e4m3fn; got {query.dtype}, {key_cache.dtype} and {value_cache.dtype}"
        )
    if not query.device == key_cache.device == value_cache.device == plan.batch.device:
        raise ValueError(
            f"query, key_cache, value_cache and plan: must be on one device, got {query.device}, "
            f"{key_cache.device}, {value_cache.device} and {plan.batch.device}"
        )
