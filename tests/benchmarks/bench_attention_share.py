"""Attention of a whole pass beside the linear layers of that pass."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from specdec.model.packed import PackedLinear
from specdec_kernels import TreeAttentionPlan, TreeBatch, plan_tree_attention, write_kv
from specdec_kernels import tree_attention as attend
from specdec_kernels.tree_attention.cpu_torch import TorchPlan
from tests.kernels.exact_cases import shallow_tree

NUM_LAYERS, HIDDEN, WIDE, VOCABULARY = 30, 576, 1536, 49_152
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
ROUNDS = 25


def linear_layers() -> list[torch.nn.Module]:
    """Those of SmolLM2-135M, the last one to the vocabulary included, as the engine packs them."""
    kv = NUM_KV_HEADS * HEAD_DIM
    layer = [(HIDDEN, HIDDEN), (HIDDEN, kv), (HIDDEN, kv), (HIDDEN, HIDDEN),
             (HIDDEN, WIDE), (HIDDEN, WIDE), (WIDE, HIDDEN)]  # fmt: skip
    return [
        PackedLinear(torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16))
        for inputs, outputs in [*(layer * NUM_LAYERS), (HIDDEN, VOCABULARY)]
    ]


class Pass:
    """The parts of one pass over the rows of one tree after `context` committed tokens."""

    def __init__(self, rows: int, context: int, linears: list[torch.nn.Module]) -> None:
        self.linears = linears
        self.inputs = {n: torch.randn(rows, n, dtype=torch.bfloat16) for n in (HIDDEN, WIDE)}
        pages = list(range(-(-(context + rows) // PAGE_SIZE)))
        tree = shallow_tree(random.Random(0), rows)
        self.batch = TreeBatch.from_lists([tree], [context], [pages], PAGE_SIZE)
        shape = (2, NUM_LAYERS, len(pages), PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.caches = torch.randn(shape, dtype=torch.bfloat16)
        self.wide_caches = self.caches.float()
        self.query = torch.randn(rows, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self.rows = torch.randn(rows, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)

    def weigh(self) -> None:
        for linear in self.linears:
            linear(self.inputs[linear.in_features])  # type: ignore[index]

    def attend_compiled(self) -> None:
        self._attend(plan_tree_attention(self.batch), self.caches, self.query, self.rows)

    def attend_torch(self) -> None:
        """Without a compiler keys and values are kept in fp32."""
        query, rows = self.query.float(), self.rows.float()
        self._attend(TorchPlan(self.batch, "fast"), self.wide_caches, query, rows)

    def _attend(
        self, plan: TreeAttentionPlan, caches: torch.Tensor, query: torch.Tensor, rows: torch.Tensor
    ) -> None:
        for keys, values in zip(caches[0], caches[1], strict=True):
            write_kv(rows, rows, keys, values, self.batch.slots)
            attend(query, keys, values, plan, scale=HEAD_DIM**-0.5)


def seconds(part: Callable[[], None]) -> float:
    begin = time.perf_counter()
    part()
    return time.perf_counter() - begin


@pytest.mark.parametrize("context", [128, 512, 2048])
@pytest.mark.parametrize("rows", [1, 16])
def bench_attention_share(benchmark: BenchmarkFixture, rows: int, context: int) -> None:
    """write_kv and tree_attention of 30 layers; extra_info has the shares of the linear layers."""
    with torch.inference_mode():
        step = Pass(rows, context, linear_layers())
        parts = {
            "linears": step.weigh,
            "compiled": step.attend_compiled,
            "torch": step.attend_torch,
        }
        for part in parts.values():
            part()
        measured: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(ROUNDS):
            for name, part in parts.items():
                measured[name].append(seconds(part))
        medians = {name: statistics.median(times) for name, times in measured.items()}
        benchmark.extra_info |= {f"{name}_ms": 1e3 * value for name, value in medians.items()}
        for name in ("compiled", "torch"):
            benchmark.extra_info[f"{name}_share"] = medians[name] / medians["linears"]
        benchmark.pedantic(step.attend_compiled, rounds=10, warmup_rounds=1)
    print(
        f"\n{rows} rows, {context} committed: linear layers {1e3 * medians['linears']:.1f} ms, "
        f"attention {1e3 * medians['compiled']:.2f} ms "
        f"({medians['compiled'] / medians['linears']:.0%}), in torch "
        f"{1e3 * medians['torch']:.2f} ms ({medians['torch'] / medians['linears']:.0%})"
    )
