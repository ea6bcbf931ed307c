"""The noise of the law inside Triton kernels; imported only by kernels."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MAX_NOISE = tl.constexpr(23.0)
"""Above `gumbel_noise` of every word: that of word 0 is 33 log 2 = 22.87."""

ROUGH_SLACK = tl.constexpr(2.0**-8)
"""Above the distance of `rough_noise` below `gumbel_noise`, for every word."""


# fmt: off
@triton.jit
def token_words(seed, stream, position, first_block, NUM_BLOCKS: tl.constexpr):
    """Words of tokens 8 * first_block and up: uint32 [8 * NUM_BLOCKS], as `philox_words` has them.

    seed, stream, position: uint64 scalars.
    """
    c0 = (first_block + tl.arange(0, NUM_BLOCKS)).to(tl.uint64)
    zero = tl.zeros([NUM_BLOCKS], tl.uint64)
    w0, w1, w2, w3 = tl.philox_impl(c0, zero + position, zero, zero, seed, stream)
    # A join makes the last dimension: [block, i, j] of this one is word 2 * i + j.
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [NUM_BLOCKS, 4])
    halves = tl.join(words.to(tl.uint32), (words >> 32).to(tl.uint32))
    return tl.reshape(halves, [NUM_BLOCKS * 8])


@triton.jit
def _uniform(words):
    return (words.to(tl.float32) + 0.5) * 2.0**-32


@triton.jit
def gumbel_noise(words):
    """-log(-log1p(-u)), u = (word + 1/2) / 2**32 rounded to fp32; uint32 [n] to fp32 [n].

    Computed in fp64 and rounded once, so that it is the same on all devices but for words whose
    noise lies within an fp64 error of the middle between two fp32 numbers. The inner logarithm is
    Kahan's log1p (Goldberg 1991, theorem 4): with w = 1 - u as rounded,
    log1p(-u) = -u * log(w) / (w - 1) * -1. No u is below 2**-33, so w is never 1. u = 1 gives -inf.
    """
    uniform = _uniform(words).to(tl.float64)
    rest = 1.0 - uniform
    exponential = -tl.log(rest) * (uniform / (1.0 - rest))
    return (-tl.log(exponential)).to(tl.float32)


@triton.jit
def rough_noise(words):
    """`gumbel_noise` from the fast fp32 logarithm: finite, and never ROUGH_SLACK or more below it.

    Its own errors: u**2 / 3 relative to the exponential below 1 / 32, an absolute 2**-22 of the
    logarithm above.
    """
    uniform = _uniform(words)
    rest = tl.maximum(1.0 - uniform, 2.0**-25)
    exponential = tl.where(uniform < 2.0**-5, uniform + 0.5 * uniform * uniform, -tl.log(rest))
    return -tl.log(exponential)
# fmt: on
