"""Equality of bits: what a row's result may not depend on."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec_kernels import TreeBatch, tree_attention
from specdec_kernels.checks.cases import Case, Setting, require
from specdec_kernels.checks.steps import Form, Step, differing_rows, make_step, trees
from specdec_kernels.tree_attention.base import SPLIT, Layout

T = TypeVar("T")

LAYOUTS: tuple[Layout, ...] = ("fast", "exact")


def cases(tiny: bool) -> list[Case]:
    """Each property in both layouts, or in the exact one where only that promises it."""
    made = []
    kinds = (None, torch.int8) if not tiny else (None,)
    for kind in kinds:
        for layout in LAYOUTS:
            form = Form(layout, cache=kind, head_dim=16 if tiny else 128)
            made += [
                Case(f"bits/tree row alone, {form.name}", partial(tree_row_alone, form=form)),
                Case(f"bits/request alone, {form.name}", partial(request_alone, form=form)),
                Case(f"bits/other nodes, {form.name}", partial(other_nodes, form=form)),
                Case(f"bits/shared prefix, {form.name}", partial(shared_prefix, form=form)),
                Case(f"bits/plan: parts, {form.name}", partial(parts_and_wholes, form=form)),
                Case(f"bits/plan: graph, {form.name}", partial(captured_graph, form=form)),
            ]
            if layout == "exact":
                made.append(
                    Case(f"bits/chain in chunks, {form.name}", partial(in_chunks, form=form))
                )
    return made


def _one_by_one(step: Step, setting: Setting) -> Tensor:
    """Every node of the first request decoded alone after its ancestors were committed.

    One batch with a copy of the request's pages for every node.
    """
    parents = step.dense.parents[0]
    assert isinstance(parents, list)
    committed, size = step.batch.committed_lens_host[0], step.form.page_size
    table = step.batch.block_tables_host[0]
    paths = [_path(parents, node) for node in range(len(parents))]
    count = len(table)
    batch = TreeBatch.from_lists(
        [[-1]] * len(paths), [committed + len(path) - 1 for path in paths],
        [list(range(count * n, count * (n + 1))) for n in range(len(paths))],
        size, setting.device,
    )  # fmt: skip

    def spread(cache: Tensor | None) -> Tensor | None:
        if cache is None:
            return None
        own = cache[torch.tensor(table, device=cache.device)].flatten(0, 1)
        copies = []
        for path in paths:
            copy = own.clone()
            nodes = torch.tensor(path, device=cache.device)
            copy[committed : committed + len(path)] = own[committed + nodes]
            copies.append(copy)
        return torch.cat(copies).view(-1, size, *cache.shape[2:])

    return step.attend(
        setting, batch=batch, query=step.query[: len(paths)],
        keys=spread(step.keys), values=spread(step.values),
        key_scales=spread(step.key_scales), value_scales=spread(step.value_scales),
    )  # fmt: skip


def _path(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def tree_row_alone(setting: Setting, *, form: Form) -> dict[str, Any]:
    """A row scored in a tree is the row decoded alone: in the exact layout, always.

    For the fast layout the share of other rows is reported, as nothing is promised.
    """
    rng = random.Random(0)
    differ = rows = 0
    for trial in range(1 if setting.tiny else 100):
        nodes = rng.randint(2, 5 if setting.tiny else 16)
        length = rng.randint(0, 40) if setting.tiny else rng.randint(0, 1600)
        step = make_step(form, trees(nodes, seed=trial), [length], setting, trial)
        differ += differing_rows(step.attend(setting), _one_by_one(step, setting))
        rows += nodes
    if form.layout == "exact":
        require(differ == 0, f"{differ} of {rows} rows differ")
    return {"rows": rows, "differing": differ}


def request_alone(setting: Setting, *, form: Form) -> dict[str, Any]:
    """A request's rows are the same alone and among others."""
    lengths = [33, 0, 7] if setting.tiny else [1500, 0, 37, 511, 512, 513, 90, 4000]
    made: list[list[int] | int] = trees(*([3, 2] if setting.tiny else [16, 1, 64, 5, 9, 2, 30]))
    step = make_step(form, [*made, 4], lengths, setting)
    together = step.attend(setting)
    ends = step.batch.cu_nodes_host
    differ = 0
    for request, tree in enumerate(step.dense.parents):
        rows = slice(ends[request], ends[request + 1])
        batch = TreeBatch.from_lists(
            [tree], [lengths[request]], [step.batch.block_tables_host[request]], form.page_size,
            setting.device,
        )  # fmt: skip
        alone = step.attend(setting, batch=batch, query=step.query[rows])
        differ += differing_rows(together[rows], alone)
    require(differ == 0, f"{differ} of {ends[-1]} rows differ")
    return {"rows": ends[-1]}


def other_nodes(setting: Setting, *, form: Form) -> dict[str, Any]:
    """Queries, keys and values of nodes off a row's path do not matter."""
    nodes = 6 if setting.tiny else 40
    step = make_step(form, trees(nodes), [20 if setting.tiny else 700], setting)
    parents = step.dense.parents[0]
    assert isinstance(parents, list)
    before = step.attend(setting)
    differ = 0
    kept_nodes = range(nodes - 2, nodes) if setting.tiny else range(0, nodes, 5)
    for node in kept_nodes:
        path = set(_path(parents, node))
        others = torch.tensor([n for n in range(nodes) if n not in path], device=setting.device)
        slots = step.batch.slots[others]
        changed = {name: tensor.clone() for name, tensor in _contents(step).items()}
        for name, tensor in changed.items():
            rows = others if name == "query" else slots
            flat = tensor if name == "query" else tensor.flatten(0, 1)
            flat[rows] = flat[rows.flip(0)]
        differ += differing_rows(
            before[node : node + 1], step.attend(setting, **changed)[node : node + 1]
        )
    require(differ == 0, f"{differ} of {len(kept_nodes)} rows differ")
    return {"rows": len(kept_nodes)}


def _contents(step: Step) -> dict[str, Tensor]:
    names = ("query", "keys", "values", "key_scales", "value_scales")
    return {name: getattr(step, name) for name in names if getattr(step, name) is not None}


def shared_prefix(setting: Setting, *, form: Form) -> dict[str, Any]:
    """Requests that share pages read them once, and get the bits they get alone."""
    count = 2 if setting.tiny else 6
    shared = SPLIT if setting.tiny else 3 * SPLIT
    lengths = [shared + 30 * request for request in range(count)]
    made = trees(*([2] * count if setting.tiny else range(4, 4 + count)))
    step = make_step(form, made, lengths, setting)
    tables = [list(table) for table in step.batch.block_tables_host]
    pages = shared // form.page_size
    for table in tables:
        table[:pages] = tables[0][:pages]
    batch = TreeBatch.from_lists(made, lengths, tables, form.page_size, setting.device)
    together = step.attend(setting, batch=batch)
    ends = batch.cu_nodes_host
    differ = 0
    for request in range(count):
        rows = slice(ends[request], ends[request + 1])
        one = TreeBatch.from_lists(
            [made[request]], [lengths[request]], [tables[request]], form.page_size, setting.device
        )
        alone = step.attend(setting, batch=one, query=step.query[rows])
        differ += differing_rows(together[rows], alone)
    require(differ == 0, f"{differ} of {ends[-1]} rows differ")
    return {"rows": ends[-1]}


def in_chunks(setting: Setting, *, form: Form) -> dict[str, Any]:
    """A chain scored in one step has the bits of the same chain scored in two."""
    rows, cut, length = (6, 2, 20) if setting.tiny else (96, 37, 600)
    step = make_step(form, [rows], [length], setting)
    whole = step.attend(setting)
    table = step.batch.block_tables_host
    differ = 0
    for first, end in ((0, cut), (cut, rows)):
        batch = TreeBatch.from_lists(
            [end - first], [length + first], table, form.page_size, setting.device
        )
        part = step.attend(setting, batch=batch, query=step.query[first:end])
        differ += differing_rows(whole[first:end], part)
    require(differ == 0, f"{differ} of {rows} rows differ")
    return {"rows": rows}


def parts_and_wholes(setting: Setting, *, form: Form) -> dict[str, Any]:
    """Into how many programs the work goes, and whether prefixes are shared, changes no bit."""
    from specdec_kernels.tree_attention.triton_plan import TritonPlan

    split = 64 if setting.tiny else SPLIT
    lengths = [2 * split + 9, 2 * split + 30] if setting.tiny else [5 * split, 2 * split + 30, 40]
    step = make_step(form, trees(*[3] * len(lengths)), lengths, setting)
    tables = [list(table) for table in step.batch.block_tables_host]
    pages = split // form.page_size
    tables[1][:pages] = tables[0][:pages]
    batch = TreeBatch.from_lists(
        step.dense.parents, lengths, tables, form.page_size, setting.device
    )
    results = []
    for programs, cascade in ((1, False), (1, True), (7, True), (1000, False)):
        plan = TritonPlan(batch, form.layout, num_programs=programs, cascade=cascade, split=split)
        results.append(tree_attention(step.query, step.keys, step.values, plan, **step.options()))
    differ = sum(differing_rows(result, results[0]) for result in results[1:])
    require(differ == 0, f"{differ} of {3 * batch.num_rows} rows differ")
    return {"rows": batch.num_rows}


def captured_graph(setting: Setting, *, form: Form) -> dict[str, Any]:
    """One captured graph, updated from batch to batch, gives what a new plan of each one gives."""
    from specdec_kernels.tree_attention.triton_lists import Capacity
    from specdec_kernels.tree_attention.triton_plan import TritonPlan

    lengths = [40, 9] if setting.tiny else [1500, 90]
    step = make_step(form, trees(*([5, 3] if setting.tiny else [40, 16])), lengths, setting)
    tables = step.batch.block_tables_host
    smaller = TreeBatch.from_lists(
        [*trees(2, seed=9), 1], [lengths[1], lengths[0] - 3], [tables[1], tables[0]],
        form.page_size, setting.device,
    )  # fmt: skip
    capacity = Capacity(requests=4, rows=step.batch.num_rows + 6, pages=len(tables[0]) + 2)
    plan = TritonPlan(step.batch, form.layout, capacity=capacity)
    query = torch.zeros(capacity.rows, *step.query.shape[1:], device=setting.device)
    query = query.to(form.dtype)

    def run() -> Tensor:
        return tree_attention(query, step.keys, step.values, plan, **step.options())

    call = run if setting.device.type == "cpu" else captured(run)
    differ = rows = 0
    for batch in (step.batch, smaller, step.batch):
        count = batch.num_rows
        plan.update(batch)
        query[:count] = step.query[:count]
        out = call()
        expected = step.attend(setting, batch=batch, query=step.query[:count])
        differ += differing_rows(out[:count], expected)
        rows += count
    require(differ == 0, f"{differ} of {rows} rows differ")
    return {"rows": rows}


def captured(run: Callable[[], T]) -> Callable[[], T]:
    """A replay of the captured call, which returns the same tensors every time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> T:
        graph.replay()
        return out

    return replay
