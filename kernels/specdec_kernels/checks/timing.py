"""Times of tree attention against the roofline floor and against other implementations.

One problem is R requests of L committed tokens with a tree of T nodes each, 32 query heads and 8
KV heads of 128, pages of 16 in random order: the attention of Llama 3 8B. Every call starts with a
cold L2 cache and runs from a captured CUDA graph, so that launches from Python do not count.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import TreeBatch, plan_tree_attention, tree_attention
from specdec_kernels.checks import rivals, roofline
from specdec_kernels.checks.bits import captured
from specdec_kernels.checks.cases import Case, Setting, require
from specdec_kernels.testing import random_tree
from specdec_kernels.tree_attention.base import Layout

PAGE_SIZE = 16
REPEATS = 15
CONTEXTS, REQUESTS, NODES = (512, 4096, 32768), (1, 8, 64), (1, 8, 16, 64)
_FLUSH_BYTES = 256 << 20

Point = tuple[int, int, int]
"""Committed tokens, requests, nodes of a request."""


class Problem(NamedTuple):
    """One point with random trees, pages and queries."""

    shape: roofline.Shape
    batch: TreeBatch
    query: Tensor


def points(tiny: bool) -> list[Point]:
    """Contexts x requests x nodes."""
    if tiny:
        return [(40, 2, 4)]
    return [(length, count, nodes) for length in CONTEXTS for count in REQUESTS for nodes in NODES]


def cases(tiny: bool) -> list[Case]:
    """Point by point: the two layouts, quantised caches, and the others."""
    made = []
    for point in points(tiny):
        name = "time/" + "x".join(str(number) for number in point)
        own: list[tuple[Layout, str]] = [("fast", "bf16"), ("exact", "bf16")]
        if tiny or point[2] == 16:
            own += [("fast", "int8"), ("fast", "fp8"), ("exact", "int8")]
        for layout, kind in own:
            run = partial(time_ours, point=point, layout=layout, kind=kind)
            made.append(Case(f"{name}/ours {layout} {kind}", run))
        for rival in rivals.RIVALS:
            if tiny or rival.is_timed_at(*point):
                run = partial(time_rival, point=point, rival=rival)
                made.append(Case(f"{name}/{rival.name}", run))
    return made


def shape_of(point: Point, tiny: bool, kv_bytes: int = 2) -> roofline.Shape:
    """The heads of Llama 3 8B; few and short ones for the interpreter."""
    length, requests, nodes = point
    shape = roofline.Shape(requests, length, nodes, kv_bytes=kv_bytes)
    return shape._replace(heads=4, kv_heads=2, head_dim=16) if tiny else shape


@lru_cache(maxsize=1)
def problem(point: Point, setting: Setting) -> Problem:
    """Trees, pages and queries of a point; the cases of one point come one after the other."""
    length, requests, nodes = point
    shape = shape_of(point, setting.tiny)
    rng = random.Random(0)
    trees = [random_tree(rng, nodes) for _ in range(requests)]
    pages = -(-(length + nodes) // PAGE_SIZE)
    order = list(range(requests * pages))
    rng.shuffle(order)
    tables = [order[pages * r : pages * (r + 1)] for r in range(requests)]
    batch = TreeBatch.from_lists(trees, [length] * requests, tables, PAGE_SIZE, setting.device)
    generator = torch.Generator(setting.device).manual_seed(0)
    query = torch.randn(
        requests * nodes, shape.heads, shape.head_dim, generator=generator, device=setting.device
    )
    return Problem(shape, batch, query.bfloat16())


@lru_cache(maxsize=1)
def pool(kind: str, setting: Setting) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Keys, values and their scales for the largest point; smaller ones use the first pages."""
    most = max(
        requests * -(-(length + nodes) // PAGE_SIZE)
        for length, requests, nodes in points(setting.tiny)
    )
    shape = shape_of(points(setting.tiny)[0], setting.tiny)
    size = (most, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    generator = torch.Generator(setting.device).manual_seed(1)
    draw = partial(torch.randint, generator=generator, device=setting.device, dtype=torch.uint8)
    caches = []
    for _ in range(2):
        if kind == "bf16":
            cache = torch.empty(size, dtype=torch.bfloat16, device=setting.device)
            caches.append(cache.normal_(generator=generator))
        elif kind == "int8":
            caches.append(draw(0, 256, size).view(torch.int8))
        else:
            # Without bit 6 every pattern is a number, below 2 in size.
            caches.append(draw(0, 256, size).bitwise_and_(0xBF).view(torch.float8_e4m3fn))
    if kind == "bf16":
        return caches[0], caches[1], None, None
    worth = 1 / 64 if kind == "int8" else 1.0
    scales = [torch.full(size[:3], worth, device=setting.device) for _ in range(2)]
    return caches[0], caches[1], scales[0], scales[1]


def ours(made: Problem, setting: Setting, layout: Layout, kind: str) -> Callable[[], Tensor]:
    """Our attention of one layer, planned."""
    keys, values, key_scales, value_scales = pool(kind, setting)
    plan = plan_tree_attention(made.batch, impl=setting.impl, layout=layout)
    return partial(
        tree_attention, made.query, keys, values, plan, scale=made.shape.head_dim**-0.5,
        key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip


def time_ours(setting: Setting, *, point: Point, layout: Layout, kind: str) -> dict[str, Any]:
    """Microseconds, and what part of the bandwidth and which multiple of the floor that is."""
    made = problem(point, setting)
    shape = shape_of(point, setting.tiny, 2 if kind == "bf16" else 1)
    return timed(ours(made, setting, layout, kind), roofline.tree_attention(shape), setting)


def time_rival(setting: Setting, *, point: Point, rival: rivals.Rival) -> dict[str, Any]:
    """The same for another implementation, which must give what ours gives."""
    made = problem(point, setting)
    keys, values, _, _ = pool("bf16", setting)
    run = rivals.prepared(rival, made.batch, made.query, keys, values)
    worst = float((run().float() - ours(made, setting, "fast", "bf16")().float()).abs().max())
    require(worst < 0.05, f"{rival.name} computes something else: it differs by {worst:.2g}")
    return timed(run, roofline.tree_attention(made.shape), setting)


def timed(run: Callable[[], Any], work: roofline.Work, setting: Setting) -> dict[str, Any]:
    """Median time and its relation to the floor of the device, if we know the device."""
    microseconds, how = median_us(run, setting)
    figures: dict[str, Any] = {"us": microseconds, "how": how}
    device = None if setting.device.type == "cpu" else known_device(torch.cuda.get_device_name())
    if device is not None:
        figures["share"] = work.bytes / (microseconds * 1e-6) / device.bandwidth
        figures["ratio"] = microseconds * 1e-6 / work.floor_s(device)
    return figures


def known_device(name: str) -> roofline.Device | None:
    """The device whose short name is a word of the driver's name; PCIe cards are slower."""
    words = name.replace("-", " ").split()
    if "PCIe" in words:
        return None
    return next((d for d in roofline.DEVICES if d.name.split()[0] in words), None)


def median_us(run: Callable[[], Any], setting: Setting) -> tuple[float, str]:
    """Microseconds of a call and how it was launched."""
    if setting.device.type == "cpu":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e6, "interpreter"
    call, how = launchable(run)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=setting.device)
    spans = []
    for _ in range(REPEATS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans) * 1e3, how


def launchable(run: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """The replay of a graph of the call; the call itself where it cannot be captured."""
    for _ in range(2):
        run()
    try:
        return captured(run), "graph"
    except RuntimeError:
        torch.cuda.synchronize()
        return run, "launched from Python"
