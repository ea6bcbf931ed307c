"""Tree attention on the CPU: matmuls per request for few rows, fused attention for many.

Two measured facts shape this file (2 cores, AVX-512 without AMX, 9/3 heads of 64). bf16 is computed
in fp32 for all row counts: on such a core that is a quarter to a third faster than the fused bf16
kernel from 8 rows on, and a row scored in a tree then differs from the same row decoded alone in
less than 0.05 % of its rounded outputs, against 30 % when the form depends on the row count. Up to
32 rows two batched matmuls and a softmax are as fast as the fused kernel or faster; they also need
a mask only where the tree is.

A plan keeps its buffers and the views of them, so that a layer allocates nothing but its result.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.batch import TreeBatch
from specdec_kernels.tree_attention.base import TreeAttentionPlan
from specdec_kernels.tree_attention.parts import Part, PartMaker

# Fused attention takes over above this many rows; below, its set-up costs more than it saves.
_MATMUL_ROWS = 32


class _Bound(NamedTuple):
    """A part with its views of the buffers.

    rows, out: [Hkv, rows, G, D]. keys, values: [length, Hkv, D] in the buffers for converted or
    gathered keys. scores, probs: [Hkv, rows * G, length], empty for fused attention.
    """

    part: Part
    rows: Tensor
    out: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor
    probs: Tensor


class _Workspace:
    """Buffers of one step for layers of one shape, dtype and window."""

    def __init__(self, parts: list[Part], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        kv_heads, _, groups, head_dim = shape
        self.rows = torch.empty(shape, dtype=dtype)
        self.out = torch.empty(shape, dtype=dtype)
        longest = max((part.length for part in parts), default=0)
        keys, values = torch.empty(2, longest, kv_heads, head_dim, dtype=dtype)
        # Rows of the score matrices, 0 where fused attention needs none.
        heights = [0 if part.fused else part.rows * groups for part in parts]
        sizes = [kv_heads * h * part.length for part, h in zip(parts, heights, strict=True)]
        scores, probs = torch.empty(2, max(sizes, default=0), dtype=dtype)
        self.bound = [
            _Bound(
                part,
                self.rows.narrow(1, part.start, part.rows),
                self.out.narrow(1, part.start, part.rows),
                keys[: part.length],
                values[: part.length],
                scores[:size].view(kv_heads, height, part.length),
                probs[:size].view(kv_heads, height, part.length),
            )
            for part, height, size in zip(parts, heights, sizes, strict=True)
        ]


class CpuPlan(TreeAttentionPlan):
    """Parts and buffers of the step, made when a layer first asks for its shape and window."""

    impl: ClassVar[str] = "cpu"

    def __init__(self, batch: TreeBatch) -> None:
        super().__init__(batch)
        self._maker = PartMaker(batch)
        self._workspaces: dict[tuple[object, ...], _Workspace] = {}

    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        kv_heads, head_dim = key_cache.shape[2:]
        groups = query.shape[1] // kv_heads
        shape = (kv_heads, self.num_rows, groups, head_dim)
        work = self._workspace(shape, query.dtype, window, capped=softcap is not None)
        by_head = query.detach().view(self.num_rows, kv_heads, groups, head_dim).transpose(0, 1)
        work.rows.copy_(by_head).mul_(scale)
        flat_keys = key_cache.flatten(0, 1)
        flat_values = value_cache.flatten(0, 1)
        for bound in work.bound:
            keys = _load(bound.part, key_cache, flat_keys, bound.keys)
            values = _load(bound.part, value_cache, flat_values, bound.values)
            if bound.part.fused:
                _fused(bound, keys, values)
            else:
                _matmul(bound, keys, values, softcap)
        result = torch.empty(query.shape, dtype=query.dtype)
        result.view(self.num_rows, kv_heads, groups, head_dim).copy_(work.out.transpose(0, 1))
        return result

    def _workspace(
        self, shape: tuple[int, ...], dtype: torch.dtype, window: int | None, *, capped: bool
    ) -> _Workspace:
        key = (shape, dtype, window, capped)
        work = self._workspaces.get(key)
        if work is not None:
            return work
        # The fused kernel knows no softcap: such layers run as matmuls, chains in small blocks.
        native = dtype in NATIVE_DTYPES and not capped
        compute = dtype if native or dtype == torch.float64 else torch.float32
        fused_above = 0 if native else _MATMUL_ROWS
        parts = self._maker.make(
            window,
            compute,
            is_fused=lambda rows: not capped and rows > fused_above,
            max_rows=_MATMUL_ROWS if capped else self.num_rows + 1,
        )
        work = self._workspaces[key] = _Workspace(parts, shape, compute)
        return work


def _detect_native() -> frozenset[torch.dtype]:
    """Low-precision dtypes whose fused kernel beats conversion to fp32: bf16 on AMX tiles."""
    # Not every supported torch tells; fp32 is then right, if not the fastest on AMX.
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return frozenset({torch.bfloat16} if capabilities.get("amx_bf16") else ())


NATIVE_DTYPES = _detect_native()


def _load(part: Part, cache: Tensor, flat: Tensor, buffer: Tensor) -> Tensor:
    """A part's keys or values [length, Hkv, D]: a view of the cache, or the filled buffer."""
    if part.pages is not None:
        gathered = cache.index_select(0, part.pages).flatten(0, 1)
        gathered = gathered.narrow(0, part.skip, part.length)
        return gathered if gathered.dtype == buffer.dtype else buffer.copy_(gathered)
    if len(part.runs) == 1:
        slots = flat.narrow(0, *part.runs[0])
        return slots if slots.dtype == buffer.dtype else buffer.copy_(slots)
    filled = 0
    for first, count in part.runs:
        buffer.narrow(0, filled, count).copy_(flat.narrow(0, first, count))
        filled += count
    return buffer


def _matmul(bound: _Bound, keys: Tensor, values: Tensor, softcap: float | None) -> None:
    """Heads of a group share a matmul, as further rows."""
    part, scores, probs = bound.part, bound.scores, bound.probs
    torch.bmm(bound.rows.flatten(1, 2), keys.permute(1, 2, 0), out=scores)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if part.bias is not None:
        num_masked = part.bias.shape[1]
        by_row = scores.view(*bound.rows.shape[:3], part.length)
        by_row.narrow(3, part.length - num_masked, num_masked).add_(part.bias.unsqueeze(1))
    torch.softmax(scores, dim=-1, out=probs)
    torch.bmm(probs, values.transpose(0, 1), out=bound.out.flatten(1, 2))


def _fused(bound: _Bound, keys: Tensor, values: Tensor) -> None:
    """Heads of KV are repeated for their group by a zero stride, nothing is copied."""
    groups = bound.rows.shape[2]
    attended = F.scaled_dot_product_attention(
        bound.rows.transpose(1, 2),
        keys.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
        values.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1),
        attn_mask=bound.part.bias,
        is_causal=bound.part.causal,
        scale=1.0,
    )
    bound.out.copy_(attended.transpose(1, 2))
