"""Rows N1, N3 and N5 of the faults other systems shipped, on the forms that run on the CPU.

Triton's form runs the same cases in `interpreted_triton.py`.
"""

from __future__ import annotations

import pytest
import torch

from specdec_kernels.tree_attention.api import Impl
from tests.kernels import fault_cases as cases

IMPLS: list[Impl] = ["reference", "cpu"]
DTYPES = list(cases.TOLERANCES)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
def test_head_groups(heads: tuple[int, int], rows: int, impl: Impl) -> None:
    for dtype in DTYPES:
        cases.check_head_group(heads, rows, cases.CONTEXTS, dtype, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
def test_head_dims(head_dim: int, dtype: torch.dtype, impl: Impl) -> None:
    cases.check_head_dim(head_dim, 300, dtype, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_padded_nodes_and_empty_requests(impl: Impl) -> None:
    cases.check_padded_nodes(impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_that_see_themselves_only(impl: Impl) -> None:
    cases.check_rows_that_see_themselves_only(impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_below_any_floor(impl: Impl) -> None:
    cases.check_scores_below_any_floor(impl)
