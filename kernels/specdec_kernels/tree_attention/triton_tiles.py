"""Parts of the attention kernels: scores, online softmax, fold, and where keys lie.

Scores are in units of log2, so that every exponential is an exp2. A state (m, l, acc) is the
largest score, the sum of weights 2 ** (score - m), and the weighted sum of values (Milakov and
Gimelshein 2018; Dao et al. 2022). A contribution in which a row sees nothing leaves its state
unchanged, bit for bit (a zero may change its sign, which the final result drops).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    # The interpreter multiplies the bit patterns of bf16 operands; widening them is exact.
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def to_numbers(x, dtype: tl.constexpr, CACHE: tl.constexpr):
    """What a cache's elements stand for, in a dtype that holds them exactly.

    e4m3 is fp16 with the exponent's bias smaller by 8 and fewer digits: its bits, moved, are a
    256th of the number.
    """
    if CACHE == 2:
        bits = x.to(tl.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        x = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    if CACHE == 1:
        # The interpreter converts integers to bf16 wrongly.
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def to_scores(products, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scaled products to scores; with a cap, they are 2 / softcap times what they were, in log2."""
    if HAS_SOFTCAP:
        # tanh from one exponential: an overflow to inf gives 1, an underflow to 0 gives -1.
        products = softcap * (1.0 - 2.0 / (tl.exp2(products) + 1.0))
    return products


@triton.jit
def _shift(m):
    # A row that has seen nothing keeps m = -inf; subtracting 0 then makes its weights 2 ** -inf.
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def empty_state(like):
    """The state of rows that have seen nothing."""
    m, l, acc = like
    return tl.full(m.shape, float("-inf"), tl.float32), tl.zeros_like(l), tl.zeros_like(acc)


@triton.jit
def accumulate(
    s, seen, v, v_scales, state, dtype: tl.constexpr, CACHE: tl.constexpr, WIDEN: tl.constexpr
):
    """One tile of scores [M, N] and values [N, D] into a state."""
    m, l, acc = state
    s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = _shift(m_new)
    # Weights as the matmul takes them: rounded ones then sum to the denominator, which lowers the
    # largest error of bf16 by about a quarter.
    p = tl.exp2(s - safe[:, None]).to(dtype)
    shrink = tl.exp2(m - safe)
    l = l * shrink + tl.sum(p.to(tl.float32), 1)
    if CACHE != 0:
        if dtype == tl.float16:
            # A weight times a small scale would leave the range of fp16; the element does not.
            v = v.to(tl.float32) * v_scales[:, None]
        else:
            p = (p.to(tl.float32) * v_scales[None, :]).to(dtype)
    acc = acc * shrink[:, None] + dot(p, v.to(dtype), WIDEN)
    return m_new, l, acc


@triton.jit
def accumulate_lane(s, v, state):
    """One key per row, scores [M] (-inf: none) and values [M, D], into a state."""
    m, l, acc = state
    m_new = tl.maximum(m, s)
    safe = _shift(m_new)
    p = tl.exp2(s - safe)
    shrink = tl.exp2(m - safe)
    return m_new, l * shrink + p, acc * shrink[:, None] + p[:, None] * v


@triton.jit
def fold(state, part):
    """Joins the state of a later part to that of all earlier ones.

    Every rounding is spelt out: this runs in two kernels, which must agree bit for bit.
    """
    m, l, acc = state
    part_m, part_l, part_acc = part
    m_new = tl.maximum(m, part_m)
    safe = _shift(m_new)
    ours = tl.exp2(m - safe)
    theirs = tl.exp2(part_m - safe)
    l = tl.fma(part_l, theirs, l * ours)
    acc = tl.fma(part_acc, tl.broadcast_to(theirs[:, None], acc.shape), acc * ours[:, None])
    return m_new, l, acc


@triton.jit
def finish(state, sinks):
    """The result, after the sinks [M] (-inf: none), which are keys without a value."""
    m, l, acc = state
    m_new = tl.maximum(m, sinks)
    safe = _shift(m_new)
    ours = tl.exp2(m - safe)
    l = tl.fma(l, ours, tl.exp2(sinks - safe))
    inverse = tl.div_rn(ours, tl.where(l == 0.0, 1.0, l))
    return acc * inverse[:, None] + 0.0


@triton.jit
def load_sinks(sinks_ptr, head, valid, HAS_SINKS: tl.constexpr):
    """fp32 [M] in units of log2."""
    sinks = tl.full(head.shape, float("-inf"), tl.float32)
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + head, mask=valid, other=0.0) * LOG2E
    return sinks


@triton.jit
def split_slots(slots, page_shift):
    """Page of physical slots, or place in the block table of logical ones, and offset there."""
    return (slots >> page_shift).to(tl.int64), slots & ((1 << page_shift) - 1)


@triton.jit
def locate(table_ptr, slots, valid, page_shift):
    """Page and offset of logical slots."""
    numbers, offsets = split_slots(slots, page_shift)
    return tl.load(table_ptr + numbers, mask=valid, other=0).to(tl.int64), offsets


@triton.jit
def load_tile(
    cache_ptr, pages, offsets, valid, dims, page, slot, head_at,
    D: tl.constexpr, D_PAD: tl.constexpr, VEC: tl.constexpr,
):
    """Elements [N, D_PAD] of one head; where not valid, and past D, 0."""
    at = tl.multiple_of(pages * page + offsets * slot + head_at, VEC)
    mask = valid[:, None]
    if D != D_PAD:
        mask = mask & (dims < D)[None, :]
    return tl.load(cache_ptr + (at[:, None] + dims[None, :]), mask=mask, other=0)


@triton.jit
def load_scales(scales_ptr, pages, offsets, valid, page_shift, kv_heads, kv_head):
    at = ((pages << page_shift) + offsets) * kv_heads + kv_head
    return tl.load(scales_ptr + at, mask=valid, other=0.0)
# fmt: on
