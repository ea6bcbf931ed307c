"""Other implementations of the same attention, for times beside ours.

Each is given what it does best: keys and values laid out densely where it has no pages, query
heads of one KV head packed into rows where it would read the keys once a head, and masks made
beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.checks.cases import SkippedError
from specdec_kernels.tree_attention.masks import ancestor_matrix

Call = Callable[[], Tensor]


class Rival(NamedTuple):
    """prepare: from batch, query, keys and values to a call that returns [S, Hq, D].

    points: the only ones at which it is timed; None: all.
    """

    name: str
    prepare: Callable[..., Call]
    points: tuple[tuple[int, int, int], ...] | None = None

    def is_timed_at(self, *point: int) -> bool:
        return self.points is None or point in self.points


def prepared(rival: Rival, *inputs: Any) -> Call:
    """The call, or SkippedError with what kept it from running once."""
    try:
        call = rival.prepare(*inputs)
        call()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise SkippedError(f"{type(error).__name__}: {text}") from error
    return call


def _dense(batch: TreeBatch, cache: Tensor, multiple: int = 1) -> Tensor:
    """[R, Hkv, L + T, D]; all requests have the same lengths. Padded with zeros to a multiple."""
    length = batch.committed_lens_host[0] + batch.cu_nodes_host[1]
    rows = cache[batch.block_tables.long()].flatten(1, 2)[:, :length].transpose(1, 2)
    return F.pad(rows, (0, 0, 0, -length % multiple)).contiguous()


def _packed_query(batch: TreeBatch, query: Tensor, kv_heads: int) -> Tensor:
    """[R, Hkv, T * G, D]."""
    nodes, groups = batch.cu_nodes_host[1], query.shape[1] // kv_heads
    split = query.view(batch.num_requests, nodes, kv_heads, groups, -1)
    return split.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous()


def _unpacked(out: Tensor, batch: TreeBatch) -> Tensor:
    nodes = batch.cu_nodes_host[1]
    split = out.view(*out.shape[:2], nodes, -1, out.shape[3]).permute(0, 2, 1, 3, 4)
    return split.flatten(2, 3).flatten(0, 1)


def _seen(batch: TreeBatch) -> Tensor:
    """bool [R, T, L + T]."""
    nodes, committed = batch.cu_nodes_host[1], batch.committed_lens_host[0]
    tree = ancestor_matrix(batch.ancestors)[:, :nodes].view(batch.num_requests, nodes, nodes)
    return torch.cat([tree.new_ones(*tree.shape[:2], committed), tree], dim=2)


def _sdpa(batch: TreeBatch, query: Tensor, keys: Tensor, values: Tensor) -> Call:
    kv_heads, head_dim = keys.shape[2:]
    packed = _packed_query(batch, query, kv_heads)
    # Rows of a mask that do not begin at multiples of 16 bytes are copied in every call.
    dense_keys, dense_values = _dense(batch, keys, 16), _dense(batch, values, 16)
    seen = _seen(batch).repeat_interleave(query.shape[1] // kv_heads, dim=1).unsqueeze(1)
    mask = query.new_full((*seen.shape[:3], dense_keys.shape[2]), float("-inf"))
    mask[..., : seen.shape[3]].masked_fill_(seen, 0.0)
    mask = mask.expand(-1, kv_heads, -1, -1)

    def call() -> Tensor:
        out = F.scaled_dot_product_attention(
            packed, dense_keys, dense_values, attn_mask=mask, scale=head_dim**-0.5
        )
        return _unpacked(out, batch)

    return call


def _flex(batch: TreeBatch, query: Tensor, keys: Tensor, values: Tensor) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    head_dim = keys.shape[3]
    requests, nodes = batch.num_requests, batch.cu_nodes_host[1]
    committed = batch.committed_lens_host[0]
    dense_keys, dense_values = _dense(batch, keys), _dense(batch, values)
    tree = ancestor_matrix(batch.ancestors)[:, :nodes].view(requests, nodes, nodes)
    rows = query.view(requests, nodes, query.shape[1], head_dim).transpose(1, 2).contiguous()

    def sees(request: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        node = (key - committed).clamp(min=0)
        return (key < committed) | tree[request, row, node]

    mask = create_block_mask(
        sees, B=requests, H=None, Q_LEN=nodes, KV_LEN=committed + nodes, device=str(query.device)
    )
    attend = torch.compile(flex_attention) if query.is_cuda else flex_attention
    run = partial(
        attend, rows, dense_keys, dense_values, block_mask=mask, scale=head_dim**-0.5,
        enable_gqa=True,
    )  # fmt: skip

    def call() -> Tensor:
        out: Tensor = run()
        return out.transpose(1, 2).flatten(0, 1)

    return call


def _flashinfer(batch: TreeBatch, query: Tensor, keys: Tensor, values: Tensor) -> Call:
    import flashinfer

    kv_heads, head_dim = keys.shape[2:]
    nodes, committed = batch.cu_nodes_host[1], batch.committed_lens_host[0]
    pages = -(-(committed + nodes) // batch.page_size)
    device = query.device
    starts = torch.arange(batch.num_requests + 1, dtype=torch.int32, device=device)
    last = (committed + nodes - 1) % batch.page_size + 1
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        starts * nodes, starts * pages, batch.block_tables[:, :pages].flatten().contiguous(),
        torch.full((batch.num_requests,), last, dtype=torch.int32, device=device),
        query.shape[1], kv_heads, head_dim, batch.page_size,
        custom_mask=_seen(batch).flatten(), sm_scale=head_dim**-0.5,
        q_data_type=query.dtype, kv_data_type=keys.dtype,
    )  # fmt: skip
    run: Call = partial(wrapper.run, query, (keys, values))
    return run


RIVALS = (
    Rival("sdpa with a mask", _sdpa),
    # Each shape compiles for many seconds.
    Rival("flex_attention", _flex, ((512, 8, 16), (4096, 8, 16), (32768, 8, 16))),
    Rival("flashinfer", _flashinfer),
)
