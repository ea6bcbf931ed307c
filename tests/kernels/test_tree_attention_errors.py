"""Arguments that do not fit together are refused by name; nothing imports triton unasked."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from specdec_kernels import TreeAttentionPlan, TreeBatch, plan_tree_attention, tree_attention


def arguments(**changed: Any) -> dict[str, Any]:
    batch = TreeBatch.from_lists([[-1, 0], 3], [4, 2], [[0, 1], [2, 3]], 4)
    fitting = {
        "query": torch.zeros(5, 6, 8),
        "key_cache": torch.zeros(4, 4, 3, 8),
        "value_cache": torch.zeros(4, 4, 3, 8),
        "plan": plan_tree_attention(batch),
        "scale": 1.0,
    }
    return fitting | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.zeros(4, 6, 8)}, r"query: must be \[S = 5, Hq, D\]"),
        ({"query": torch.zeros(5, 48)}, r"query: must be \[S = 5, Hq, D\]"),
        ({"query": torch.zeros(5, 4, 8)}, "4 heads of 8 do not fit the cache's 3 heads of 8"),
        ({"query": torch.zeros(5, 6, 16)}, "6 heads of 16 do not fit the cache's 3 heads of 8"),
        ({"key_cache": torch.zeros(4, 4, 3, 4)}, "key_cache and value_cache: must have one shape"),
        ({"value_cache": torch.zeros(4, 4, 24)}, "key_cache and value_cache: must have one shape"),
        ({"query": torch.zeros(5, 6, 8).half()}, "must have one floating dtype"),
        ({"value_cache": torch.zeros(4, 4, 3, 8).double()}, "must have one floating dtype"),
        ({"query": torch.zeros(5, 6, 8, device="meta")}, "must be on one device"),
        ({"window": 0}, "window: must be at least 1 or None, got 0"),
        ({"softcap": 0.0}, "softcap: must be positive and finite or None"),
        ({"softcap": float("inf")}, "softcap: must be positive and finite or None"),
        ({"sinks": torch.zeros(3)}, r"sinks: must be \[Hq = 6\] of a floating dtype"),
        ({"sinks": torch.zeros(1, 6)}, r"sinks: must be \[Hq = 6\] of a floating dtype"),
        (
            {"sinks": torch.zeros(6, dtype=torch.int32)},
            "floating dtype or None, got .* torch.int32",
        ),
        ({"sinks": torch.zeros(6, device="meta")}, "sinks: must be on the query's device cpu"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    tree_attention(**arguments())
    with pytest.raises(ValueError, match=message):
        tree_attention(**arguments(**changed))


def test_wrong_caches_are_named() -> None:
    other_pages = torch.zeros(8, 2, 3, 8)
    with pytest.raises(ValueError, match="its page size is 2, the batch was built for 4"):
        tree_attention(**arguments(key_cache=other_pages, value_cache=other_pages))
    too_few = torch.zeros(3, 4, 3, 8)
    with pytest.raises(ValueError, match="it has 3 pages, but a block table names page 3"):
        tree_attention(**arguments(key_cache=too_few, value_cache=too_few))
    integers = torch.zeros(4, 4, 3, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="must have one floating dtype"):
        tree_attention(
            **arguments(
                query=torch.zeros(5, 6, 8, dtype=torch.int32),
                key_cache=integers,
                value_cache=integers,
            )
        )


def test_plans_are_chosen_by_device_and_name() -> None:
    batch = TreeBatch.from_lists([1], [0], [[0]], 4)
    assert plan_tree_attention(batch).impl == "cpu"
    assert plan_tree_attention(batch, impl="reference").impl == "reference"
    assert isinstance(plan_tree_attention(batch), TreeAttentionPlan)
    with pytest.raises(ValueError, match="impl: must be"):
        plan_tree_attention(batch, impl="cuda")  # type: ignore[arg-type]
    elsewhere = TreeBatch.from_lists([1], [0], [[0]], 4, device="meta")
    assert plan_tree_attention(elsewhere).impl == "reference"
    with pytest.raises(ValueError, match='impl: "cpu" needs tensors on the CPU'):
        plan_tree_attention(elsewhere, impl="cpu")


def test_nothing_on_the_cpu_imports_triton() -> None:
    code = """
import sys
import torch
before = set(sys.modules)
import specdec_kernels as k
batch = k.TreeBatch.from_lists([[-1, 0]], [4], [[0, 1]], 4)
query, cache = torch.zeros(2, 2, 8), torch.zeros(2, 4, 1, 8)
k.write_kv(query[:, :1], query[:, :1], cache, cache.clone(), batch.slots)
k.tree_attention(query, cache, cache, k.plan_tree_attention(batch), scale=1.0)
k.compact_kv([cache[None]], batch.slots, batch.slots)
assert "triton" not in sys.modules, "triton was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
