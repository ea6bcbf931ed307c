"""Correctness of every kernel: attention against fp64, everything else bit for bit.

These cases run first and in parallel, so they name every variant that is timed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import TreeBatch, compact_kv, write_kv
from specdec_kernels.accept.api import accept
from specdec_kernels.accept.base import Accepted
from specdec_kernels.checks.cases import Case, Setting, require
from specdec_kernels.checks.steps import Form, make_step, short, trees
from specdec_kernels.compact_kv.api import compact_paths
from specdec_kernels.dispatch import Impl
from specdec_kernels.quantise import LIMITS
from specdec_kernels.sample.api import sample
from specdec_kernels.sample.base import SampleOutput
from specdec_kernels.testing import assert_matches_low_precision_reference, dense_attention
from specdec_kernels.tree_layout.device import DeviceLayout, layout_trees

FORMS = (
    Form("fast"),
    Form("exact"),
    Form("fast", cache=torch.int8),
    Form("fast", cache=torch.float8_e4m3fn),
    Form("exact", cache=torch.int8),
    Form("fast", torch.float16, groups=1, head_dim=80, window=50, softcap=20.0),
    Form("exact", torch.float16, groups=8, head_dim=64, window=70, has_sinks=True),
    Form("fast", torch.float32, groups=3, head_dim=64),
)
TINY_FORMS = (
    Form("fast", torch.float32, head_dim=16),
    Form("exact", torch.float16, head_dim=16, window=9, has_sinks=True),
    Form("fast", torch.bfloat16, torch.int8, head_dim=16),
)


def cases(tiny: bool) -> list[Case]:
    """Every operation in the variants that are shipped most."""
    made = [
        Case(f"correct/tree_attention {form.name}", partial(attention, form=form))
        for form in (TINY_FORMS if tiny else FORMS)
    ]
    if not tiny:
        made.append(Case("correct/tree_attention prompt chunk", partial(prompt, form=FORMS[0])))
    for cache in (torch.bfloat16, *LIMITS):
        run = partial(kv_write, cache=cache)
        made.append(Case(f"correct/write_kv {short(cache)} cache", run))
    made.append(Case("correct/compact_kv", kv_move))
    made.append(Case("correct/compact_paths", kv_paths))
    made.append(Case("correct/tree_layout", layout))
    made.append(Case("correct/accept", walk))
    made.append(Case("correct/sample", law))
    return made


def attention(setting: Setting, *, form: Form) -> dict[str, Any]:
    """Ragged trees and a chain against dense fp64, with every slot of nobody poisoned."""
    sizes, lengths = ([3, 5], [20, 0]) if setting.tiny else ([16, 64, 1, 9], [1030, 0, 511, 16])
    return _against_fp64(setting, form, [*trees(*sizes), 5], [*lengths, 40])


def prompt(setting: Setting, *, form: Form) -> dict[str, Any]:
    """A chunk of a prompt beside a tree."""
    return _against_fp64(setting, form, [300, *trees(16)], [700, 90])


def _against_fp64(
    setting: Setting, form: Form, made: Sequence[list[int] | int], lengths: Sequence[int]
) -> dict[str, Any]:
    step = make_step(form, made, lengths, setting)
    actual = step.attend(setting).cpu()
    options = {k: v for k, v in step.options().items() if not k.endswith("_scales")}
    if step.sinks is not None:
        options["sinks"] = step.sinks.cpu()
    high = dense_attention(step.dense, **options)
    low = dense_attention(step.dense, dtype=form.dtype, **options)
    assert_matches_low_precision_reference(actual, high, low, form.name)
    error = (actual.double() - high).abs().max()
    return {"largest error": float(error), "reference's": float((low.double() - high).abs().max())}


def _same(name: str, actual: Tensor, expected: Tensor) -> None:
    """Bit for bit, NaN too."""
    left, right = (t.cpu().contiguous().view(torch.uint8) for t in (actual, expected))
    require(torch.equal(left, right), f"{name}: {int((left != right).sum())} bytes differ")


def kv_write(setting: Setting, *, cache: torch.dtype) -> dict[str, Any]:
    """The bits of the reference on the CPU, every other slot untouched."""
    rows, pages = (5, 3) if setting.tiny else (130, 40)
    shape = (pages, 16, 2, 16) if setting.tiny else (pages, 16, 8, 128)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(rows, *shape[2:], generator=generator).bfloat16() for _ in range(2))
    key[0, 0], value[-1, 1, 3] = 0, 1e4
    slots = torch.randperm(shape[0] * shape[1], generator=generator)[:rows]
    expected, actual = (
        _written(key, value, shape, slots, cache, *where)
        for where in ((torch.device("cpu"), "reference"), (setting.device, setting.impl))
    )
    names = ("key_cache", "value_cache", "key_scales", "value_scales")
    for name, a, b in zip(names, actual, expected, strict=True):
        _same(name, a, b)
    return {"rows": rows}


def _written(
    key: Tensor, value: Tensor, shape: tuple[int, ...], slots: Tensor, dtype: torch.dtype,
    device: torch.device, impl: Impl,
) -> list[Tensor]:  # fmt: skip
    """Caches and scales, full of other things before."""
    keys, values = (torch.full(shape, 3.0).to(dtype).to(device) for _ in range(2))
    scales = [torch.full(shape[:3], 7.0, device=device) for _ in range(2)]
    key_scales, value_scales = scales if dtype in LIMITS else (None, None)
    write_kv(
        key.to(device), value.to(device), keys, values, slots.to(device),
        key_scales=key_scales, value_scales=value_scales, impl=impl,
    )  # fmt: skip
    return [keys, values, *scales]


def kv_move(setting: Setting) -> dict[str, Any]:
    """Overlapping moves in several stacks, against reads that all precede the writes."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, 16, 2, 16) if setting.tiny else (32, 40, 16, 8, 128)
    caches = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
    src = torch.randperm(60, generator=generator)[:9]
    dst = torch.cat([src[1:], src[:1]])
    moved = [cache.clone().to(setting.device) for cache in caches]
    compact_kv(moved, src.to(setting.device), dst.to(setting.device), impl=setting.impl)
    for before, actual in zip(caches, moved, strict=True):
        expected = before.clone()
        expected.flatten(1, 2)[:, dst] = before.flatten(1, 2)[:, src]
        _same("caches", actual, expected)
    return {"moves": len(src)}


def kv_paths(setting: Setting) -> dict[str, Any]:
    """The accepted paths of a batch: one in place, one that moves, none at all."""
    generator = torch.Generator().manual_seed(0)
    lengths, counts = [14, 31, 0], [6, 9, 4]
    tables = [[5, 2], [0, 3, 4], [1]]
    batch = TreeBatch.from_lists(trees(*counts), lengths, tables, 16, setting.device)
    paths = torch.tensor([[0, 1, 2, -1], [0, 2, 5, 8], [-1] * 4], dtype=torch.int32)
    num_nodes = torch.tensor([3, 4, 0], dtype=torch.int32)
    shape = (3, 6, 16, 2, 16)
    caches = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
    moved = [cache.clone().to(setting.device) for cache in caches]
    compact_paths(
        moved, batch, paths.to(setting.device), num_nodes.to(setting.device), impl=setting.impl
    )

    def slot(request: int, logical: int) -> tuple[int, int]:
        return tables[request][logical // 16], logical % 16

    for before, actual in zip(caches, moved, strict=True):
        expected = before.clone()
        for request, count in enumerate(num_nodes.tolist()):
            for place, node in enumerate(paths[request, :count].tolist()):
                target = slot(request, lengths[request] + place)
                source = slot(request, lengths[request] + node)
                expected[:, target[0], target[1]] = before[:, source[0], source[1]]
        _same("caches", actual, expected)
    return {"requests": 3}


def layout(setting: Setting) -> dict[str, Any]:
    """Every field of the reference on the CPU, for trees of up to 256 nodes and a chain."""
    sizes = [3, 9] if setting.tiny else [1, 64, 256, 65, 12]
    host = TreeBatch.from_lists(
        [*trees(*sizes), 7], [13] * (len(sizes) + 1),
        [list(range(20 * r, 20 * r + 20)) for r in range(len(sizes) + 1)], 16,
    )  # fmt: skip

    def on(device: torch.device, impl: Impl) -> DeviceLayout:
        inputs = (host.parents, host.cu_nodes, host.committed_lens, host.block_tables)
        parents, ends, lengths, tables = (tensor.to(device) for tensor in inputs)
        is_chain = host.is_chain.to(device)
        return layout_trees(parents, ends, lengths, tables, 16, 4, 16, is_chain=is_chain, impl=impl)

    expected = on(torch.device("cpu"), "reference")
    actual = on(setting.device, setting.impl)
    for name in DeviceLayout._fields:
        _same(name, getattr(actual, name), getattr(expected, name))
    return {"rows": host.num_rows}


def walk(setting: Setting) -> dict[str, Any]:
    """Every field of the reference's walk, for random trees of tokens that are often chosen."""
    sizes = [4, 9] if setting.tiny else [1, 8, 16, 64, 200] * 6
    made = trees(*sizes)
    host = TreeBatch.from_lists(made, [5] * len(sizes), [list(range(20))] * len(sizes), 16)
    tokens: list[int] = []
    for tree in made:
        assert isinstance(tree, list)
        # Children are numbered, so that siblings carry different tokens.
        tokens += [tree[:node].count(parent) for node, parent in enumerate(tree)]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, 2, (host.num_rows,), generator=generator)

    def on(device: torch.device, impl: Impl) -> Accepted:
        batch = TreeBatch.from_lists(
            made, host.committed_lens_host, host.block_tables_host, 16, device
        )
        return accept(
            batch, torch.tensor(tokens).to(device), chosen.to(device), max_depth=15, impl=impl
        )

    expected = on(torch.device("cpu"), "reference")
    actual = on(setting.device, setting.impl)
    for name in Accepted._fields:
        _same(name, getattr(actual, name), getattr(expected, name))
    return {"requests": len(sizes), "accepted": int(expected.num_accepted.sum())}


def law(setting: Setting) -> dict[str, Any]:
    """The reference's tokens; one in a hundred may differ, where two scores differ by rounding."""
    rows, vocabulary = (4, 300) if setting.tiny else (128, 50_000)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    column = torch.arange(rows)

    def on(device: torch.device, impl: Impl) -> SampleOutput:
        return sample(
            logits.to(device),
            temperature=((column % 4) * 0.5).to(device),
            top_k=((column % 3) * 20).int().to(device),
            top_p=(1.0 - (column % 2) * 0.1).to(device),
            min_p=((column % 5 == 4) * 0.02).float().to(device),
            seeds=(column * 7 - 9).to(device), positions=(column + 3).to(device), impl=impl,
        )  # fmt: skip

    expected = on(torch.device("cpu"), "reference")
    actual = on(setting.device, setting.impl)
    same = actual.token_ids.cpu() == expected.token_ids
    differ = int((~same).sum())
    require(differ * 100 <= rows, f"{differ} of {rows} tokens differ")
    worst = float((actual.logprobs.cpu() - expected.logprobs)[same].abs().max())
    require(worst < 1e-3, f"log-probabilities differ by {worst:.1e}")
    return {"rows": rows, "other tokens": differ, "log-probabilities differ by": worst}
