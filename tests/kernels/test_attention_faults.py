"""Rows N1, N3 and N5 of the faults other systems shipped, on the forms that run on the CPU.

Triton's form runs the same cases in `interpreted_tree_attention.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels import fault_cases as cases
from tests.kernels.forms import CPU_FORMS

DTYPES = list(cases.TOLERANCES)


@pytest.mark.parametrize("form", CPU_FORMS)
@pytest.mark.parametrize("rows", cases.ROWS)
@pytest.mark.parametrize("heads", cases.HEADS, ids=str)
def test_head_groups(heads: tuple[int, int], rows: int, form: str) -> None:
    for dtype in DTYPES:
        cases.check_head_group(heads, rows, cases.CONTEXTS, dtype, form)


@pytest.mark.parametrize("form", CPU_FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", cases.HEAD_DIMS)
def test_head_dims(head_dim: int, dtype: torch.dtype, form: str) -> None:
    cases.check_head_dim(head_dim, 300, dtype, form)


@pytest.mark.parametrize("form", CPU_FORMS)
def test_padded_nodes_and_empty_requests(form: str) -> None:
    cases.check_padded_nodes(form)


@pytest.mark.parametrize("form", CPU_FORMS)
def test_rows_that_see_themselves_only(form: str) -> None:
    cases.check_rows_that_see_themselves_only(form)


@pytest.mark.parametrize("form", CPU_FORMS)
def test_scores_below_any_floor(form: str) -> None:
    cases.check_scores_below_any_floor(form)
