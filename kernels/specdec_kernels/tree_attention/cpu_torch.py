"""Tree attention on the CPU in torch: matmuls per request for few rows, fused attention for many.

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
from specdec_kernels.tree_attention.base import LayerOptions, Layout, TreeAttentionPlan
from specdec_kernels.tree_attention.parts import Part, PartMaker, Span

# Fused attention takes over above this many rows; below, its set-up costs more than it saves.
_MATMUL_ROWS = 32
# Where fused attention cannot take a prompt, its blocks are so small that a score matrix of all
# heads has about this many elements (16 MB in fp32), however long the context is.
_MAX_SCORES = 1 << 22


class _Bound(NamedTuple):
    """A part with its views of the buffers.

    rows, out: [Hkv, rows, G, D]. scores, probs: [Hkv, rows * G, length], in layers with sinks one
    column more; logits, weights: the same without that column; by_row: scores as [Hkv, rows, G,
    columns]. The last five are empty for fused attention.
    """

    part: Part
    rows: Tensor
    out: Tensor
    scores: Tensor
    probs: Tensor
    logits: Tensor
    weights: Tensor
    by_row: Tensor


class _Loaded(NamedTuple):
    """The parts of one request and the buffers [room, Hkv, D] for its keys and values."""

    span: Span
    keys: Tensor
    values: Tensor
    parts: list[_Bound]


class _Layout(NamedTuple):
    """What buffers depend on beside the step: shape is [Hkv, S, G, D], dtype that of the cache."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    window: int | None
    capped: bool
    sunk: bool


class _Workspace:
    """Buffers of one step for layers of one layout, which compute in `compute`."""

    def __init__(
        self,
        requests: list[tuple[Span, list[Part]]],
        layout: _Layout,
        compute: torch.dtype,
    ) -> None:
        kv_heads, _, groups, head_dim = layout.shape
        extra = 1 if layout.sunk else 0
        self.rows = torch.empty(layout.shape, dtype=compute)
        self.out = torch.empty(layout.shape, dtype=compute)
        most = max((span.room for span, _ in requests), default=0)
        keys, values = torch.empty(2, most, kv_heads, head_dim, dtype=compute)
        # Whole pages are gathered in their own dtype first.
        gathers = any(span.pages is not None for span, _ in requests)
        room = most if gathers and layout.dtype != compute else 0
        self.raw = torch.empty(room, kv_heads, head_dim, dtype=layout.dtype)
        sizes = [
            kv_heads * part.rows * groups * (part.length + extra)
            for _, parts in requests
            for part in parts
            if not part.fused
        ]
        buffers = torch.empty(2, max(sizes, default=0), dtype=compute)

        def bind(part: Part) -> _Bound:
            rows, out = (t.narrow(1, part.start, part.rows) for t in (self.rows, self.out))
            height = 0 if part.fused else part.rows
            width = part.length + extra
            used = buffers[:, : kv_heads * height * groups * width]
            scores, probs = used.view(2, kv_heads, height * groups, width)
            logits, weights = (t.narrow(2, 0, part.length) for t in (scores, probs))
            by_row = scores.view(kv_heads, height, groups, width)
            return _Bound(part, rows, out, scores, probs, logits, weights, by_row)

        self.requests = [
            _Loaded(span, keys[: span.room], values[: span.room], [bind(p) for p in parts])
            for span, parts in requests
        ]


class TorchPlan(TreeAttentionPlan):
    """Parts and buffers of the step, made when a layer first asks for its shape and window."""

    impl: ClassVar[str] = "cpu"

    def __init__(self, batch: TreeBatch, layout: Layout) -> None:
        super().__init__(batch, layout)
        self._maker = PartMaker(batch)
        self._workspaces: dict[_Layout, _Workspace] = {}

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, options: LayerOptions
    ) -> Tensor:
        scale, window, softcap, sinks = options[:4]
        kv_heads, head_dim = key_cache.shape[2:]
        groups = query.shape[1] // kv_heads
        shape = (kv_heads, self.num_rows, groups, head_dim)
        layout = _Layout(shape, query.dtype, window, softcap is not None, sinks is not None)
        work = self._workspace(layout)
        by_head = query.view(self.num_rows, kv_heads, groups, head_dim).transpose(0, 1)
        work.rows.copy_(by_head).mul_(scale)
        if sinks is not None:
            sinks = sinks.to(work.rows.dtype).view(kv_heads, 1, groups)
        flat_keys = key_cache.flatten(0, 1)
        flat_values = value_cache.flatten(0, 1)
        for span, key_buffer, value_buffer, parts in work.requests:
            all_keys = _load(span, key_cache, flat_keys, key_buffer, work.raw)
            all_values = _load(span, value_cache, flat_values, value_buffer, work.raw)
            for bound in parts:
                first, length = bound.part.first, bound.part.length
                keys, values = all_keys, all_values
                if length != span.length:
                    keys, values = keys.narrow(0, first, length), values.narrow(0, first, length)
                if bound.part.fused:
                    _fused(bound, keys, values)
                else:
                    _matmul(bound, keys, values, softcap, sinks)
        result = torch.empty(query.shape, dtype=query.dtype)
        result.view(self.num_rows, kv_heads, groups, head_dim).copy_(work.out.transpose(0, 1))
        return result

    def _workspace(self, layout: _Layout) -> _Workspace:
        work = self._workspaces.get(layout)
        if work is not None:
            return work
        # The fused kernel knows neither softcap nor sinks: such layers run as matmuls.
        can_fuse = not (layout.capped or layout.sunk)
        dtype = layout.dtype
        native = dtype in NATIVE_DTYPES and can_fuse
        compute = dtype if native or dtype == torch.float64 else torch.float32
        fused_above = 0 if native else _MATMUL_ROWS
        num_heads = layout.shape[0] * layout.shape[2]

        def block_rows(num_keys: int) -> int:
            if can_fuse:
                return self.num_rows
            return min(_MATMUL_ROWS, max(1, _MAX_SCORES // (num_heads * num_keys)))

        requests = self._maker.make(
            layout.window, compute, lambda rows: can_fuse and rows > fused_above, block_rows
        )
        work = _Workspace(requests, layout, compute)
        self._workspaces[layout] = work
        return work


def _detect_native() -> frozenset[torch.dtype]:
    """Low-precision dtypes whose fused kernel beats conversion to fp32: bf16 on AMX tiles."""
    # Not every supported torch tells; fp32 is then right, if not the fastest on AMX.
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return frozenset({torch.bfloat16} if capabilities.get("amx_bf16") else ())


NATIVE_DTYPES = _detect_native()


def _load(span: Span, cache: Tensor, flat: Tensor, buffer: Tensor, raw: Tensor) -> Tensor:
    """A request's keys or values [length, Hkv, D]: a view of the cache, or of the filled buffer.

    raw: buffer [room, Hkv, D] of the cache's dtype for gathered pages; not used where the dtype of
    `buffer` is the same.
    """
    convert = cache.dtype != buffer.dtype
    filled = buffer[: span.length]
    if span.pages is not None:
        gathered = (raw if convert else buffer)[: span.room]
        torch.index_select(cache, 0, span.pages, out=gathered.view(-1, *cache.shape[1:]))
        slots = gathered.narrow(0, span.skip, span.length)
        return filled.copy_(slots) if convert else slots
    if len(span.runs) == 1:
        slots = flat.narrow(0, *span.runs[0])
        return filled.copy_(slots) if convert else slots
    at = 0
    for first, count in span.runs:
        filled.narrow(0, at, count).copy_(flat.narrow(0, first, count))
        at += count
    return filled


def _matmul(
    bound: _Bound, keys: Tensor, values: Tensor, softcap: float | None, sinks: Tensor | None
) -> None:
    """Heads of a group share a matmul, as further rows."""
    part, logits = bound.part, bound.logits
    torch.bmm(bound.rows.flatten(1, 2), keys.permute(1, 2, 0), out=logits)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if part.bias is not None:
        num_masked = part.bias.shape[1]
        masked = bound.by_row.narrow(3, part.length - num_masked, num_masked)
        masked.add_(part.bias.unsqueeze(1))
    if sinks is not None:
        bound.by_row.select(3, part.length).copy_(sinks)
    torch.softmax(bound.scores, dim=-1, out=bound.probs)
    torch.bmm(bound.weights, values.transpose(0, 1), out=bound.out.flatten(1, 2))


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
