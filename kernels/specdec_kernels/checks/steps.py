"""Random steps on the device of the GPU check, with quantised caches too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import TreeBatch, plan_tree_attention, tree_attention
from specdec_kernels.checks.cases import Setting
from specdec_kernels.quantise import quantise
from specdec_kernels.testing import RandomStep, random_step, random_tree
from specdec_kernels.tree_attention.base import Layout


class Form(NamedTuple):
    """Which variant of the kernels a case is about.

    cache: dtype of the KV cache, None for the query's. options: window, softcap, sinks.
    """

    layout: Layout
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype | None = None
    groups: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def name(self) -> str:
        cache = "" if self.cache is None else f" {short(self.cache)} cache"
        extras = [
            text
            for text, on in (
                ("window", self.window), ("softcap", self.softcap), ("sinks", self.has_sinks)
            )
            if on
        ]  # fmt: skip
        return " ".join([f"{self.layout} {short(self.dtype)}{cache} d{self.head_dim}", *extras])


def short(dtype: torch.dtype) -> str:
    """bf16 for torch.bfloat16, and so on."""
    names = {
        torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "int8",
        torch.float8_e4m3fn: "fp8",
    }  # fmt: skip
    return names[dtype]


class Step(NamedTuple):
    """A step on the device. dense: the same on the host, with keys and values as the cache has
    them. keys, values and scales hold NaN, or a scale of NaN, wherever no request owns a slot."""

    form: Form
    dense: RandomStep
    batch: TreeBatch
    query: Tensor
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    sinks: Tensor | None

    def attend(self, setting: Setting, **changed: Any) -> Tensor:
        """The kernels' result; `changed` replaces fields of the step."""
        step = self._replace(**changed)
        plan = plan_tree_attention(step.batch, impl=setting.impl, layout=step.form.layout)
        return tree_attention(step.query, step.keys, step.values, plan, **step.options())

    def options(self) -> dict[str, Any]:
        """What `tree_attention` takes beside tensors and the plan."""
        return {
            "scale": self.form.head_dim**-0.5, "window": self.form.window,
            "softcap": self.form.softcap, "sinks": self.sinks,
            "key_scales": self.key_scales, "value_scales": self.value_scales,
        }  # fmt: skip


def make_step(
    form: Form,
    trees: Sequence[list[int] | int],
    lengths: Sequence[int],
    setting: Setting,
    seed: int = 0,
) -> Step:
    """Random contents; queries, keys and values as `random_step` draws them."""
    dense = random_step(
        trees, lengths, num_heads=form.groups * form.kv_heads, num_kv_heads=form.kv_heads,
        head_dim=form.head_dim, page_size=form.page_size, dtype=form.dtype, seed=seed,
    )  # fmt: skip
    host = dense.batch
    batch = TreeBatch.from_lists(
        trees, lengths, host.block_tables_host, form.page_size, setting.device
    )
    caches: list[Tensor] = [dense.key_cache, dense.value_cache]
    scales: list[Tensor | None] = [None, None]
    if form.cache is not None:
        for index, cache in enumerate(caches):
            caches[index], scales[index] = quantise(cache, form.cache)
        for parts in (dense.keys, dense.values):
            parts[:] = [_worth(part, form.cache) for part in parts]
    sinks = None
    if form.has_sinks:
        generator = torch.Generator().manual_seed(seed)
        sinks = torch.randn(dense.query.shape[1], generator=generator).to(form.dtype)
    placed = [
        None if tensor is None else tensor.to(setting.device)
        for tensor in (dense.query, *caches, *scales, sinks)
    ]
    return Step(form, dense, batch, *placed)  # type: ignore[arg-type]


def _worth(rows: Tensor, dtype: torch.dtype) -> Tensor:
    numbers, scales = quantise(rows, dtype)
    return numbers.double() * scales.double().unsqueeze(-1)


def trees(*sizes: int, seed: int = 0) -> list[list[int] | int]:
    """Random trees of so many nodes."""
    rng = random.Random(seed)
    return [random_tree(rng, size) for size in sizes]


def differing_rows(a: Tensor, b: Tensor) -> int:
    """Rows of [S, ...] with at least one other bit; NaN equals the same NaN."""
    pairs = (t.contiguous().view(torch.uint8).flatten(1) for t in (a, b))
    left, right = pairs
    return int((left != right).any(1).sum())
