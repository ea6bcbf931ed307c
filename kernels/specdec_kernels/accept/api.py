"""Entry point of accept: validation and choice of form."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from specdec_kernels.accept.base import Accepted
from specdec_kernels.batch import TreeBatch
from specdec_kernels.dispatch import Impl, choose
from specdec_kernels.tree_layout.api import MAX_TREE_NODES, WORD_BITS

__all__ = ["Accepted", "accept"]


def accept(
    batch: TreeBatch,
    token_ids: Tensor,
    chosen: Tensor,
    *,
    max_depth: int,
    impl: Impl = "auto",
) -> Accepted:
    """Walks from every root to the child that carries the law's token, for as long as there is one.

    batch: trees and chains of up to 256 rows; a request without rows accepts and emits nothing.
    token_ids: int64 [S], the token that each node carries; siblings carry different ones (a form
    may follow any of several equal siblings). chosen: int64 [S], the law's token at each node; a
    negative one (a row that `sample` reports) ends the walk and is emitted as it is. max_depth: in
    0..255; deeper nodes are passed over as if they had not been drafted, so that outputs have a
    size that does not depend on the trees. Nothing is read back from a device.

    The walk and its equality to sequential sampling: Daliri, Musco and Suresh 2024, "Coupling
    without communication and drafter-invariant speculative decoding".

    Raises ValueError naming the argument if a shape, dtype, device or size is not as above.
    """
    _check_batch(batch)
    for name, tensor in (("token_ids", token_ids), ("chosen", chosen)):
        if tensor.dtype != torch.int64 or tensor.shape != (batch.num_rows,):
            raise ValueError(
                f"{name}: must be int64 [S = {batch.num_rows}], got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
        if tensor.device != batch.device:
            raise ValueError(
                f"{name}: must be on the batch's device {batch.device}, got {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous; call .contiguous() on it")
    if not 0 <= max_depth < MAX_TREE_NODES:
        raise ValueError(f"max_depth: must lie in 0..{MAX_TREE_NODES - 1}, got {max_depth}")
    form = choose("accept", impl, batch.device)
    return cast("Accepted", form(batch, token_ids, chosen, max_depth))


def _check_batch(batch: TreeBatch) -> None:
    for request, (start, end) in enumerate(pairwise(batch.cu_nodes_host)):
        if end - start > MAX_TREE_NODES:
            raise ValueError(
                f"batch: request {request} has {end - start} rows, accept takes at most "
                f"{MAX_TREE_NODES}; leave prompt chunks out"
            )
    rows, words = batch.num_rows, batch.ancestors.shape[-1]
    if not 1 <= words * WORD_BITS <= MAX_TREE_NODES:
        raise ValueError(f"batch.ancestors: must have 1..4 words a row, got {words}")
    for name, dtype, shape in (
        ("cu_nodes", torch.int32, (batch.num_requests + 1,)),
        ("parents", torch.int32, (rows,)),
        ("depths", torch.int32, (rows,)),
        ("ancestors", torch.int64, (rows, words)),
        ("is_chain", torch.bool, (batch.num_requests,)),
    ):
        tensor = getattr(batch, name)
        if tensor.dtype != dtype or tensor.shape != shape or tensor.device != batch.device:
            raise ValueError(
                f"batch.{name}: must be {dtype} {shape} on {batch.device}, got {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"batch.{name}: must be contiguous; call .contiguous() on it")
