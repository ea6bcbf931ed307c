"""The records of one step, in the order in which they come to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.request_state import Request
from specdec_drafts.tree import TokenTree
from specdec_kernels import TreeBatch


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request's share of a step.

    num_pending: tokens without KV that this step computes, in order. is_judged: whether they reach
    the request's last token, so that the step emits. max_nodes, max_depth: allowance of drafted
    nodes; slots for num_pending + max_nodes rows are reserved.
    """

    request: Request
    num_pending: int
    is_judged: bool
    max_nodes: int
    max_depth: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Who takes part in a step. page_copies: (source, target) pages to copy before it."""

    entries: tuple[PlannedRequest, ...]
    page_copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """All rows of a step, requests one after the other.

    token_ids: int64 [S]. trees: the ragged description of the rows. judged_rows: int64 [J], rows
    whose logits are wanted, ascending: every node of a tree, the last row of a finished prompt.
    """

    token_ids: torch.Tensor
    trees: TreeBatch
    judged_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class JudgedEntry:
    """Where an entry's logits stand among the judged rows of its step.

    first: index of the first. num_prompt_rows: rows whose logits are for prompt log-probabilities;
    those of the tree, if the entry is judged, come after them.
    """

    entry: PlannedRequest
    first: int
    num_prompt_rows: int


class RowLogits:
    """Logits of one request's judged rows, converted to float32 on the host row by row.

    The walk visits few of the rows, and a row costs more to convert than to compute.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def __len__(self) -> int:
        return self._logits.shape[0]

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> NDArray[np.float32]:
        """float32 [V] logits of a row."""
        row: NDArray[np.float32] = self._logits[index].float().numpy(force=True)
        return row


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the walk found for one request.

    path: node indices whose tokens are committed, the root first, parents before children.
    emitted: the law's token at each node of the path: the accepted drafted tokens, then the bonus.
    """

    tree: TokenTree
    path: Sequence[int]
    emitted: Sequence[int]
