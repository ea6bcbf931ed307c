"""accept as one Triton launch, a program per request; imported only when chosen.

A node matches if it carries the law's token at its parent. It is accepted if it and all its
ancestors match, which its ancestor words tell at once: no bit of them is outside the matching set.
Siblings carry different tokens, so the accepted nodes are one path and their depths number it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.accept.base import Accepted
from specdec_kernels.batch import TreeBatch
from specdec_kernels.configuration import Configuration
from specdec_kernels.tree_layout.api import MAX_TREE_NODES, WORD_BITS


# fmt: off
@triton.jit(do_not_specialize=["num_requests", "max_depth"])
def accept_kernel(
    cu_nodes_ptr, parents_ptr, depths_ptr, ancestors_ptr, is_chain_ptr, token_ids_ptr, chosen_ptr,
    num_accepted_ptr, path_ptr, emitted_ptr, num_requests, max_depth,
    NUM_WORDS: tl.constexpr, NODES: tl.constexpr, REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    exists = request < num_requests
    start = tl.load(cu_nodes_ptr + request, mask=exists, other=0)
    num_nodes = tl.load(cu_nodes_ptr + request + 1, mask=exists, other=0) - start
    is_chain = tl.load(is_chain_ptr + request, mask=exists, other=0) != 0
    node = tl.arange(0, NODES)[None, :]
    valid = node < num_nodes[:, None]
    start = start.to(tl.int64)[:, None]
    row = start + node

    parent = tl.load(parents_ptr + row, mask=valid, other=-1)
    depth = tl.load(depths_ptr + row, mask=valid, other=0)
    drafted = valid & (parent >= 0)
    wanted = tl.load(chosen_ptr + start + parent, mask=drafted, other=-1)
    carried = tl.load(token_ids_ptr + row, mask=drafted, other=-1)
    matched = drafted & (carried == wanted) & (wanted >= 0) & (depth <= max_depth) | (node == 0)

    bit = tl.full([1, NODES], 1, tl.int64) << (node % 64).to(tl.int64)
    hindered = tl.zeros([REQUESTS, NODES], tl.int64)
    for word in tl.static_range(NUM_WORDS):
        matching = tl.sum(tl.where(matched & (node // 64 == word), bit, 0), 1)
        ancestors = tl.load(ancestors_ptr + row * NUM_WORDS + word, mask=valid, other=0)
        hindered = hindered | (ancestors & ~matching[:, None])
    first_other = tl.min(tl.where(matched, NODES, node), 1)
    in_chain = is_chain[:, None] & (node < first_other[:, None])
    accepted = valid & (in_chain | (~is_chain[:, None] & (hindered == 0)))

    length = tl.sum(accepted.to(tl.int32), 1)
    tl.store(num_accepted_ptr + request, tl.maximum(length - 1, 0), mask=exists)
    out = request[:, None] * (max_depth + 1)
    law = tl.load(chosen_ptr + row, mask=accepted, other=-1)
    tl.store(path_ptr + out + depth, tl.broadcast_to(node, [REQUESTS, NODES]), mask=accepted)
    tl.store(emitted_ptr + out + depth, law, mask=accepted)
    unused = exists[:, None] & (node >= length[:, None]) & (node <= max_depth)
    tl.store(path_ptr + out + node, tl.full([REQUESTS, NODES], -1, tl.int32), mask=unused)
    tl.store(emitted_ptr + out + node, tl.full([REQUESTS, NODES], -1, tl.int64), mask=unused)
# fmt: on


def _configuration(num_words: int) -> Configuration:
    integers = ["cu_nodes_ptr", "parents_ptr", "depths_ptr", "num_accepted_ptr", "path_ptr"]
    wide = ["ancestors_ptr", "token_ids_ptr", "chosen_ptr", "emitted_ptr"]
    return Configuration(
        name=f"accept/accept/w{num_words}",
        kernel=accept_kernel,
        signature={
            **dict.fromkeys(integers, "*i32"),
            **dict.fromkeys(wide, "*i64"),
            "is_chain_ptr": "*i1",
            "num_requests": "i32",
            "max_depth": "i32",
        },
        constants={"NUM_WORDS": num_words, "NODES": MAX_TREE_NODES, "REQUESTS": 1},
        num_warps=4,
        num_stages=1,
        needs_matrix=False,
    )


def configurations() -> list[Configuration]:
    """Every configuration that a launch can use."""
    return [_configuration(words) for words in range(1, MAX_TREE_NODES // WORD_BITS + 1)]


def triton_accept(
    batch: TreeBatch, token_ids: Tensor, chosen: Tensor, max_depth: int, **constants: int
) -> Accepted:
    """As `accept`, without its checks.

    constants: in place of the shipped configuration's, for tests of many requests.
    """
    shape = (batch.num_requests, max_depth + 1)
    device = batch.device
    accepted = Accepted(
        torch.empty(shape[:1], dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
    )
    if not batch.num_requests:
        return accepted
    config = _configuration(batch.ancestors.shape[1])
    constants = {**config.constants, **constants}
    config.kernel[(triton.cdiv(batch.num_requests, constants["REQUESTS"]),)](
        batch.cu_nodes, batch.parents, batch.depths, batch.ancestors, batch.is_chain, token_ids,
        chosen, *accepted, batch.num_requests, max_depth,
        **constants, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return accepted
