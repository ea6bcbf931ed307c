"""Tree attention as one Triton launch over the whole ragged batch.

Imported only when chosen. Each program takes a block of rows of one request and one KV head; the
query heads of that KV head are packed with the rows into the M dimension of the matmuls. It walks
the committed slots tile by tile, then the request's own nodes with the ancestor words as mask, with
an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_attention.base import TreeAttentionPlan

_MAX_BLOCK_M = 64
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


# fmt: off
@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scores(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr, WIDEN: tl.constexpr):
    s = _dot(q, tl.trans(k), WIDEN) * scale
    if HAS_SOFTCAP:
        # tanh from one exponential: an overflow to inf gives 1, an underflow to 0 gives -1.
        s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
    return s


@triton.jit
def _accumulate(s, seen, v, m, denominator, acc, WIDEN: tl.constexpr):
    s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row that has seen nothing keeps m = -inf; subtracting 0 then makes its weights exp(-inf).
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    # Weights as the matmul takes them: rounded ones then sum to the denominator, which lowers the
    # largest error of bf16 by about a quarter.
    p = tl.exp(s - m_safe[:, None]).to(v.dtype)
    shrink = tl.exp(m - m_safe)
    denominator = denominator * shrink + tl.sum(p.to(tl.float32), 1)
    acc = acc * shrink[:, None] + _dot(p, v, WIDEN)
    return m_new, denominator, acc


@triton.jit
def _load_kv(
    k_ptr, v_ptr, table_ptr, slots, valid, dims, D, PAGE_SIZE: tl.constexpr,
    k_page, k_slot, k_head, v_page, v_slot, v_head, kv_head,
):
    pages = tl.load(table_ptr + slots // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
    offsets = slots % PAGE_SIZE
    mask = valid[:, None] & (dims < D)[None, :]
    k_at = pages * k_page + offsets * k_slot + kv_head * k_head
    v_at = pages * v_page + offsets * v_slot + kv_head * v_head
    k = tl.load(k_ptr + k_at[:, None] + dims[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + v_at[:, None] + dims[None, :], mask=mask, other=0.0)
    return k, v


@triton.jit
def tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr,
    block_requests_ptr, block_rows_ptr, cu_nodes_ptr, committed_ptr, tables_ptr,
    depths_ptr, ancestors_ptr, is_chain_ptr,
    scale, softcap, window, table_width,
    q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_row, out_head,
    G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    request = tl.load(block_requests_ptr + block)
    first_node = tl.load(block_rows_ptr + block)
    start = tl.load(cu_nodes_ptr + request)
    num_nodes = tl.load(cu_nodes_ptr + request + 1) - start
    committed = tl.load(committed_ptr + request)
    is_chain = tl.load(is_chain_ptr + request) != 0
    table_ptr = tables_ptr + request.to(tl.int64) * table_width

    lane = tl.arange(0, BLOCK_M)
    node = first_node + lane // G
    lane_valid = (lane < ROWS * G) & (node < num_nodes)
    row = (start + node).to(tl.int64)
    head = kv_head * G + lane % G
    dims = tl.arange(0, D_PAD)
    q_mask = lane_valid[:, None] & (dims < D)[None, :]
    q_at = row * q_row + head * q_head
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=q_mask, other=0.0)
    depth = tl.load(depths_ptr + row, mask=lane_valid, other=0)
    position = committed + depth

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # The sink is the first key of every row: weight exp(sink - m) = 1, and no value.
        m = tl.load(sinks_ptr + head, mask=lane_valid, other=float("-inf")).to(tl.float32)
        denominator = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    tile = tl.arange(0, BLOCK_N)

    first_slot = 0
    if HAS_WINDOW:
        # Depths grow along a chain only; a tree's block may hold any depth, the root's included.
        shallowest = tl.min(tl.where(lane_valid, position, 2147483647), 0)
        first_slot = tl.maximum(shallowest - window + 1, 0) // BLOCK_N * BLOCK_N
    for base in range(first_slot, committed, BLOCK_N):
        slots = base + tile
        valid = slots < committed
        k, v = _load_kv(
            k_ptr, v_ptr, table_ptr, slots, valid, dims, D, PAGE_SIZE,
            k_page, k_slot, k_head, v_page, v_slot, v_head, kv_head,
        )
        seen = lane_valid[:, None] & valid[None, :]
        if HAS_WINDOW:
            seen = seen & (slots[None, :] > (position - window)[:, None])
        s = _scores(q, k, scale, softcap, HAS_SOFTCAP, WIDEN)
        m, denominator, acc = _accumulate(s, seen, v, m, denominator, acc, WIDEN)

    # Parents come before children, so no row of the block sees a node after the block's last one.
    end_node = tl.minimum(first_node + ROWS, num_nodes)
    for base in range(0, end_node, BLOCK_N):
        nodes = base + tile
        valid = nodes < end_node
        k, v = _load_kv(
            k_ptr, v_ptr, table_ptr, committed + nodes, valid, dims, D, PAGE_SIZE,
            k_page, k_slot, k_head, v_page, v_slot, v_head, kv_head,
        )
        in_words = lane_valid & (base < NUM_WORDS * 64)
        word = tl.load(ancestors_ptr + row * NUM_WORDS + base // 64, mask=in_words, other=0)
        bit = (word[:, None] >> (nodes % 64).to(tl.int64)[None, :]) & 1
        causal = nodes[None, :] <= node[:, None]
        seen = lane_valid[:, None] & valid[None, :] & ((is_chain & causal) | (bit == 1) & ~is_chain)
        if HAS_WINDOW:
            key_depth = tl.load(depths_ptr + start + nodes, mask=valid, other=0)
            seen = seen & (key_depth[None, :] > (depth - window)[:, None])
        s = _scores(q, k, scale, softcap, HAS_SOFTCAP, WIDEN)
        m, denominator, acc = _accumulate(s, seen, v, m, denominator, acc, WIDEN)

    result = acc / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    out_at = row * out_row + head * out_head
    tl.store(
        out_ptr + out_at[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=q_mask
    )
# fmt: on


def block_sizes(
    groups: int, head_dim: int, most_rows: int, element_size: int = 2
) -> tuple[int, int, int]:
    """(rows per program, BLOCK_M, BLOCK_N) for G query heads per KV head; any G and head_dim.

    element_size: bytes of the cache's dtype; wide elements get short tiles, to fit shared memory.
    """
    wanted = triton.next_power_of_2(groups * most_rows)
    block_m = max(16, triton.next_power_of_2(groups), min(wanted, _MAX_BLOCK_M))
    block_n = (64 if head_dim <= 128 else 32) * 2 // max(2, element_size)
    return block_m // groups, block_m, block_n


class TritonPlan(TreeAttentionPlan):
    """Which program takes which rows, per number of rows a program holds."""

    impl: ClassVar[str] = "triton"

    def __init__(self, batch: TreeBatch) -> None:
        super().__init__(batch)
        if batch.device.type == "cpu" and not triton.knobs.runtime.interpret:
            raise ValueError(
                'impl: "triton" needs a batch on a GPU; on the CPU set TRITON_INTERPRET=1 before '
                "Python starts"
            )
        counts = batch.cu_nodes_host
        self._most_rows = max((b - a for a, b in pairwise(counts)), default=0)
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def _blocks_of(self, rows: int) -> tuple[Tensor, Tensor]:
        blocks = self._blocks.get(rows)
        if blocks is None:
            counts = self.batch.cu_nodes_host
            pairs = [
                (request, first)
                for request in range(self.batch.num_requests)
                for first in range(0, counts[request + 1] - counts[request], rows)
            ]
            table = torch.tensor(pairs, dtype=torch.int32).view(-1, 2).t().contiguous()
            requests, firsts = table.to(self.batch.device).unbind()
            blocks = self._blocks[rows] = (requests, firsts)
        return blocks

    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if query.dtype not in _DTYPES:
            raise ValueError(
                f'query: the "triton" form computes fp16, bf16 and fp32, got {query.dtype}; use '
                'impl="reference"'
            )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if not self.num_rows:
            return out
        if query.stride(2) != 1:
            query = query.contiguous()
        if key_cache.stride(3) != 1 or value_cache.stride(3) != 1:
            raise ValueError("key_cache and value_cache: the head dimension must be contiguous")
        if sinks is not None:
            sinks = (sinks if sinks.dtype in _DTYPES else sinks.float()).contiguous()
        batch = self.batch
        kv_heads, head_dim = key_cache.shape[2:]
        groups = query.shape[1] // kv_heads
        rows, block_m, block_n = block_sizes(
            groups, head_dim, self._most_rows, query.element_size()
        )
        requests, firsts = self._blocks_of(rows)
        tree_attention_kernel[(requests.shape[0], kv_heads)](
            query, key_cache, value_cache, query if sinks is None else sinks, out,
            requests, firsts, batch.cu_nodes, batch.committed_lens, batch.block_tables,
            batch.depths, batch.ancestors, batch.is_chain,
            scale, softcap or 1.0, window or 0, batch.block_tables.shape[1],
            *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
            *out.stride()[:2],
            G=groups, D=head_dim, D_PAD=max(16, triton.next_power_of_2(head_dim)),
            PAGE_SIZE=batch.page_size, NUM_WORDS=batch.ancestors.shape[1],
            ROWS=rows, BLOCK_M=block_m, BLOCK_N=block_n,
            HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            # The interpreter multiplies the bit patterns of bf16 operands; widening them is exact.
            WIDEN=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        )  # fmt: skip
        return out
