"""Times of the other operations for the step that the roofline table is about."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import TreeBatch, compact_kv, write_kv
from specdec_kernels.accept.api import accept
from specdec_kernels.checks import roofline
from specdec_kernels.checks.cases import Case, Setting
from specdec_kernels.checks.steps import trees
from specdec_kernels.checks.timing import timed
from specdec_kernels.sample.api import sample
from specdec_kernels.tree_layout.device import layout_trees

PAGE_SIZE = 16
_TINY = roofline.Shape(2, 20, 4, heads=4, kv_heads=2, head_dim=16, layers=2, vocabulary=300)


def cases(tiny: bool) -> list[Case]:
    """One case an operation, at the shapes of `roofline.EXAMPLE`."""
    shape = _TINY if tiny else roofline.EXAMPLE
    runs = {
        "write_kv bf16": partial(time_write, shape=shape),
        "write_kv int8": partial(time_write, shape=shape._replace(kv_bytes=1)),
        "compact_kv": partial(time_compact, shape=shape),
        "tree_layout": partial(time_layout, shape=shape),
        "accept": partial(time_accept, shape=shape),
        "sample": partial(time_sample, shape=shape),
    }
    return [Case(f"time/example/{name}", run) for name, run in runs.items()]


def _batch(shape: roofline.Shape, setting: Setting) -> TreeBatch:
    pages = -(-(shape.committed + shape.nodes) // PAGE_SIZE)
    tables = [list(range(pages * r, pages * (r + 1))) for r in range(shape.requests)]
    return TreeBatch.from_lists(
        trees(*[shape.nodes] * shape.requests), [shape.committed] * shape.requests, tables,
        PAGE_SIZE, setting.device,
    )  # fmt: skip


def _caches(shape: roofline.Shape, setting: Setting, *groups: int) -> list[Tensor]:
    pages = shape.requests * -(-(shape.committed + shape.nodes) // PAGE_SIZE)
    size = (*groups, pages, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    dtype = torch.bfloat16 if shape.kv_bytes == 2 else torch.int8
    return [torch.zeros(size, dtype=dtype, device=setting.device) for _ in range(2)]


def time_write(setting: Setting, *, shape: roofline.Shape) -> dict[str, Any]:
    """One layer's rows."""
    caches = _caches(shape, setting)
    size = (shape.rows, shape.kv_heads, shape.head_dim)
    key, value = (torch.randn(size, device=setting.device).bfloat16() for _ in range(2))
    scales: list[Tensor | None] = [None, None]
    if shape.kv_bytes == 1:
        scales = [torch.zeros(caches[0].shape[:3], device=setting.device) for _ in range(2)]
    run = partial(
        write_kv, key, value, caches[0], caches[1], _batch(shape, setting).slots,
        key_scales=scales[0], value_scales=scales[1], impl=setting.impl,
    )  # fmt: skip
    return timed(run, roofline.write_kv(shape), setting)


def time_compact(setting: Setting, *, shape: roofline.Shape) -> dict[str, Any]:
    """Four tokens a request, keys and values of all layers."""
    caches = _caches(shape, setting, shape.layers)
    moved = min(4, shape.nodes // 2)
    first = _batch(shape, setting).slots.view(shape.requests, shape.nodes)
    src, dst = first[:, -moved:].flatten(), first[:, :moved].flatten()
    run = partial(compact_kv, caches, src, dst, impl=setting.impl)
    return timed(run, roofline.compact_kv(shape, moved), setting)


def time_layout(setting: Setting, *, shape: roofline.Shape) -> dict[str, Any]:
    """Parents that lie on the device."""
    batch = _batch(shape, setting)
    run = partial(
        layout_trees, batch.parents, batch.cu_nodes, batch.committed_lens, batch.block_tables,
        PAGE_SIZE, -(-shape.nodes // 64), 16, impl=setting.impl,
    )  # fmt: skip
    return timed(run, roofline.tree_layout(shape), setting)


def time_accept(setting: Setting, *, shape: roofline.Shape) -> dict[str, Any]:
    """Every node's token is its number, and the law chose one of the first."""
    batch = _batch(shape, setting)
    rows = torch.arange(batch.num_rows, device=setting.device)
    run = partial(accept, batch, rows, rows % 3, max_depth=15, impl=setting.impl)
    return timed(run, roofline.accept(shape), setting)


def time_sample(setting: Setting, *, shape: roofline.Shape) -> dict[str, Any]:
    """Temperature 0.7 and top-p 0.9."""
    rows = torch.arange(shape.rows, device=setting.device)
    run = partial(
        sample, torch.randn(shape.rows, shape.vocabulary, device=setting.device),
        temperature=torch.full((shape.rows,), 0.7, device=setting.device),
        top_p=torch.full((shape.rows,), 0.9, device=setting.device),
        seeds=rows, positions=rows, impl=setting.impl,
    )  # fmt: skip
    return timed(run, roofline.sample(shape), setting)
