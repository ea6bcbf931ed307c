"""Which keys a row sees, as a boolean matrix; the one place where this is spelt out in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_layout.api import WORD_BITS


def ancestor_matrix(words: Tensor) -> Tensor:
    """int64 bit words [rows, W] -> bool [rows, 64 * W]: is node j the row or above it?"""
    bits = torch.arange(WORD_BITS, device=words.device)
    return ((words.unsqueeze(2) >> bits) & 1).flatten(1).bool()


def visible(
    batch: TreeBatch,
    request: int,
    window: int | None,
    first_slot: int = 0,
    first_row: int = 0,
    num_rows: int | None = None,
) -> Tensor:
    """May row first_row + i of the request see its logical slot first_slot + j?

    Logical slots below L are committed tokens, slot L + j is node j. Slots end with the last row
    asked for. Returns bool [num_rows, L + first_row + num_rows - first_slot].
    """
    start, end = batch.cu_nodes_host[request : request + 2]
    committed = batch.committed_lens_host[request]
    last_row = end - start if num_rows is None else first_row + num_rows
    slots = torch.arange(first_slot, committed + last_row, device=batch.device)
    if batch.is_chain_host[request]:
        rows = torch.arange(first_row, last_row, device=batch.device)
        seen = slots <= (committed + rows).unsqueeze(1)
    else:
        own = ancestor_matrix(batch.ancestors[start + first_row : start + last_row])[:, :last_row]
        seen = torch.cat([own.new_ones(own.shape[0], committed), own], dim=1)[:, first_slot:]
    if window is not None:
        positions = torch.arange(committed + last_row, device=batch.device)
        positions[committed:] = committed + batch.depths[start : start + last_row]
        own_positions = positions[committed + first_row :].unsqueeze(1)
        seen = seen & (positions[first_slot:] > own_positions - window)
    return seen
