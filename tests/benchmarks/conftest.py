"""The two targets that everything is timed on: a tiny random one, and the real default model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM
from specdec.testing import RandomDrafter, tiny_llama, tiny_tokenizer
from specdec_evals.provenance import package_versions

TREE_SHAPE = (4, 2, 1)
"""Children per depth of the trees that are scored: 4 + 8 + 8 = 20 drafted nodes."""


@dataclass(frozen=True)
class Size:
    """Shape of a target's tensors: what the parts are timed with when no model is needed."""

    name: str
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    context: int


SIZES = (
    Size("tiny", 512, 6, 2, 16, torch.float32, 128),
    Size("real", 49_152, 9, 3, 64, torch.bfloat16, 512),
)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: Any) -> None:
    machine_info["threads"] = torch.get_num_threads()
    machine_info["packages"] = package_versions()


@pytest.fixture(params=SIZES, ids=lambda size: size.name)
def size(request: pytest.FixtureRequest) -> Size:
    return request.param


def _load(name: str, request: pytest.FixtureRequest) -> LLM:
    if name == "tiny":
        return LLM(tiny_llama(), tiny_tokenizer(), draft=RandomDrafter(512, TREE_SHAPE))
    path: Path = request.getfixturevalue("smol_path")
    return LLM(path, draft=RandomDrafter(49_152, TREE_SHAPE), dtype="bf16")


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.smol)])
def llm(request: pytest.FixtureRequest) -> LLM:
    """A target whose drafter offers a random tree of 20 drafted nodes at every step."""
    return _load(request.param, request)
