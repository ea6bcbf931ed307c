"""The law's tail as one Triton program per row; imported only when chosen.

A program walks its row of V logits a few times in blocks and never sorts. What a filter must know,
a key of which everything lighter or heavier goes, is found digit by digit: eight prefixes of the
key are weighed in every pass. Counts and masses are whole numbers, whose sums do not depend on
order: bits of a result depend on neither the block's shape nor other rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.configuration import Configuration
from specdec_kernels.sample.base import MAX_CHOICES, RowOptions, SampleOutput
from specdec_kernels.sample.penalties_triton import penalty_configuration, triton_penalise
from specdec_kernels.sample.philox_triton import (
    MAX_NOISE,
    ROUGH_SLACK,
    gumbel_noise,
    rough_noise,
    token_words,
)

BLOCK = 1024
_NUM_WARPS = 16
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

_MASS_ONE = tl.constexpr(2.0**42)
"""Weight 1 as a whole number; the masses of 2**20 tokens (MAX_VOCAB_SIZE) fit into int64."""

_INFINITY = tl.constexpr(0x7F800000)
_LOWEST = tl.constexpr(-(2**63))
_TOP_K = tl.constexpr(0)
_TOP_P = tl.constexpr(1)
_IDS = tl.constexpr(2)


# fmt: off
@triton.jit
def _load(row_ptr, ids, vocab_size):
    return tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _largest(row_ptr, vocab_size, BLOCK: tl.constexpr):
    """The largest logit, NaN if any is."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    strange = tl.zeros([BLOCK], tl.int32)
    for base in range(0, vocab_size, BLOCK):
        logits = _load(row_ptr, base + tl.arange(0, BLOCK), vocab_size)
        strange = strange | (logits != logits).to(tl.int32)
        largest = tl.maximum(largest, logits)
    return tl.where(tl.max(strange, 0) > 0, float("nan"), tl.max(largest, 0))


@triton.jit
def _judge(row_ptr, ids, vocab_size, best, divisor, kth):
    """(logits, scaled, magnitude, kept, weight) of a block: logits relative to the best one over
    the temperature, which are <= 0; bits of their magnitudes; whether those are finite and up to
    kth; exp(scaled) <= 1."""
    logits = _load(row_ptr, ids, vocab_size)
    scaled = tl.div_rn(logits - best, divisor)
    magnitude = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    kept = (magnitude <= kth) & (magnitude < _INFINITY)
    return logits, scaled, magnitude, kept, tl.minimum(tl.exp(scaled), 1.0)


@triton.jit
def _boundary(
    row_ptr, vocab_size, best, divisor, kth, edge, limit, WHAT: tl.constexpr, BLOCK: tl.constexpr,
):
    """The smallest key for which the amount of all tokens up to it exceeds limit.

    _TOP_K: keys are magnitudes of scaled logits, each token amounts to 1. _TOP_P: keys are bits of
    weights, which keep their order, and amounts masses. _IDS: keys are ids, each token of weight
    `edge` amounts to 1. The amount of all tokens must exceed limit. Keys have 31 bits, of which
    every pass finds three: with four the sums no longer fit into registers.
    """
    found = 0
    digits = tl.arange(0, 8)
    for step in range(11):
        shift = tl.maximum(28 - 3 * step, 0)
        ends = found + (digits << shift) + ((1 << shift) - 1)
        amounts = tl.zeros([BLOCK, 8], tl.int64)
        for base in range(0, vocab_size, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            _, _, key, kept, weight = _judge(row_ptr, ids, vocab_size, best, divisor, kth)
            amount = (ids < vocab_size).to(tl.int64)
            if WHAT != _TOP_K:
                key = weight.to(tl.int32, bitcast=True)
                if WHAT == _TOP_P:
                    amount = tl.where(kept, (weight * _MASS_ONE).to(tl.int64), 0)
                else:
                    amount = (kept & (key == edge)).to(tl.int64)
                    key = ids
            amounts += tl.where(key[:, None] <= ends[None, :], amount[:, None], 0)
        found += tl.sum((tl.sum(amounts, 0) <= limit).to(tl.int32), 0) << shift
    return found


@triton.jit
def _mass_below(row_ptr, vocab_size, best, divisor, kth, edge, BLOCK: tl.constexpr):
    """The mass of the tokens up to kth whose weight is below `edge`, and how many have it."""
    below = tl.zeros([BLOCK], tl.int64)
    count = tl.zeros([BLOCK], tl.int64)
    for base in range(0, vocab_size, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        _, _, _, kept, weight = _judge(row_ptr, ids, vocab_size, best, divisor, kth)
        key = weight.to(tl.int32, bitcast=True)
        below += tl.where(kept & (key < edge), (weight * _MASS_ONE).to(tl.int64), 0)
        count += (kept & (key == edge)).to(tl.int64)
    return tl.sum(below, 0), tl.sum(count, 0)


@triton.jit
def _filters(row_ptr, vocab_size, best, divisor, top_k, top_p, BLOCK: tl.constexpr):
    """(kth, edge, last_id): what stays has a magnitude up to kth, and a weight whose bits are above
    edge, or equal to it and an id up to last_id."""
    kth = _INFINITY
    edge = -1
    last_id = 0x7FFFFFFF
    if (top_k > 0) & (top_k < vocab_size):
        limit = (top_k - 1).to(tl.int64)
        kth = _boundary(row_ptr, vocab_size, best, divisor, 0, 0, limit, _TOP_K, BLOCK)
    if top_p < 1.0:
        # Every mass is below that of weight 2, so `below` is the mass of all.
        everything, _ = _mass_below(row_ptr, vocab_size, best, divisor, kth, 1 << 30, BLOCK)
        tail = ((1.0 - top_p.to(tl.float64)) * everything.to(tl.float64)).to(tl.int64)
        tail = tl.minimum(tail, everything - 1)  # the heaviest token always stays
        edge = _boundary(row_ptr, vocab_size, best, divisor, kth, 0, tail, _TOP_P, BLOCK)
        below, count = _mass_below(row_ptr, vocab_size, best, divisor, kth, edge, BLOCK)
        mass = (edge.to(tl.float32, bitcast=True) * _MASS_ONE).to(tl.int64)
        stay = count - (tail - below) // mass
        if stay < count:
            last_id = _boundary(
                row_ptr, vocab_size, best, divisor, kth, edge, stay - 1, _IDS, BLOCK
            )
    return kth, edge, last_id


@triton.jit
def _ordered(bits):
    """fp32 bits as int32 in the order of the numbers; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _insert(best_keys, scores, ids, kept):
    """The largest keys after a block's: a key is a score and, for equal scores, the lowest id."""
    scores = tl.where(scores == 0.0, 0.0, scores)  # the two zeros are equal
    high = _ordered(scores.to(tl.int32, bitcast=True)).to(tl.int64) << 32
    keys = tl.where(kept, high | (0x7FFFFFFF - ids).to(tl.int64), _LOWEST)
    top = tl.max(keys, 0)
    last = tl.min(best_keys, 0)
    while top > last:
        best_keys = tl.where(best_keys == last, top, best_keys)
        keys = tl.where(keys == top, _LOWEST, keys)
        top = tl.max(keys, 0)
        last = tl.min(best_keys, 0)
    return best_keys


@triton.jit
def _floor(best_keys):
    """The score that the next token must reach to be among the best; -inf while there is room."""
    high = (tl.min(best_keys, 0) >> 32).to(tl.int32)
    score = _ordered(high).to(tl.float32, bitcast=True)
    return tl.where(high == -2147483648, float("-inf"), score)


@triton.jit
def _rank(
    row_ptr, vocab_size, best, divisor, kth, edge, last_id, min_p, greedy, seed, stream, position,
    best_keys, BLOCK: tl.constexpr,
):
    """The keys of the best survivors, and the mass of all survivors."""
    masses = tl.zeros([BLOCK], tl.int64)
    for base in range(0, vocab_size, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        logits, scaled, _, kept, weight = _judge(row_ptr, ids, vocab_size, best, divisor, kth)
        key = weight.to(tl.int32, bitcast=True)
        kept = kept & ((key > edge) | ((key == edge) & (ids <= last_id))) & (weight >= min_p)
        masses += tl.where(kept, (weight * _MASS_ONE).to(tl.int64), 0)
        if greedy:
            best_keys = _insert(best_keys, logits, ids, kept)
        else:
            floor = _floor(best_keys)
            able = kept & (scaled + MAX_NOISE >= floor)
            if tl.max(able.to(tl.int32), 0) > 0:
                words = token_words(seed, stream, position, base // 8, BLOCK // 8)
                # Few blocks can hold a new best token: only those pay for exact noise.
                rough = tl.where(able, scaled, 0.0) + rough_noise(words)
                reach = rough + ROUGH_SLACK + tl.abs(rough) * 2.0**-20
                if tl.max(tl.where(able, reach, float("-inf")), 0) >= floor:
                    scores = scaled + gumbel_noise(words)
                    best_keys = _insert(best_keys, scores, ids, able)
    return best_keys, tl.sum(masses, 0)


@triton.jit(do_not_specialize=["vocab_size", "stream", "num_choices", "mode"])
def sample_kernel(
    raw_ptr, row_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    tokens_ptr, logprobs_ptr, raw_stride, row_stride, vocab_size, stream, num_choices, mode,
    CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):
    j = tl.program_id(0).to(tl.int64)
    raw_ptr += j * raw_stride
    row_ptr += j * row_stride
    tokens_ptr += j * num_choices
    logprobs_ptr += j * num_choices
    temperature = tl.load(temperature_ptr + j)
    top_k = tl.load(top_k_ptr + j)
    top_p = tl.load(top_p_ptr + j)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, tl.maximum(temperature, 1e-30))

    best = _largest(row_ptr, vocab_size, BLOCK)
    finite = (best > float("-inf")) & (best < float("inf"))  # False for NaN
    best = tl.where(finite, best, 0.0)
    raw_best = 0.0
    raw_mass = tl.full([], 1, tl.int64)
    if (mode == 0) & finite:
        raw_best = _largest(raw_ptr, vocab_size, BLOCK)
        raw_mass, _ = _mass_below(raw_ptr, vocab_size, raw_best, 1.0, _INFINITY, 1 << 30, BLOCK)
    # Greedy rows have no filters, and of a row that is not finite nothing stays.
    filtered = finite & (temperature != 0.0)
    top_k = tl.where(filtered, top_k, 0)
    top_p = tl.where(filtered, top_p, 1.0)
    kth, edge, last_id = _filters(row_ptr, vocab_size, best, divisor, top_k, top_p, BLOCK)
    kth = tl.where(finite, kth, -1)

    lanes = tl.arange(0, CHOICES)
    wanted = lanes < num_choices
    best_keys = tl.where(wanted, _LOWEST + lanes.to(tl.int64), 0x7FFFFFFFFFFFFFFF)
    min_p = tl.where(filtered, tl.load(min_p_ptr + j), 0.0)
    seed = tl.load(seeds_ptr + j).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + j).to(tl.uint64, bitcast=True)
    best_keys, mass = _rank(
        row_ptr, vocab_size, best, divisor, kth, edge, last_id, min_p, greedy,
        seed, stream.to(tl.uint64), position, best_keys, BLOCK,
    )
    best_keys = tl.where(wanted, best_keys, _LOWEST)

    mass = tl.where(mode == 0, raw_mass, mass)
    log_mass = tl.log(tl.maximum(mass, 1).to(tl.float64) / _MASS_ONE)
    place = tl.sum((best_keys[None, :] > best_keys[:, None]).to(tl.int32), 1)
    found = (best_keys >> 32) != -2147483648
    token = tl.where(found, 0x7FFFFFFF - (best_keys & 0x7FFFFFFF), -1)
    at = tl.maximum(token, 0)
    if mode == 0:
        height = tl.load(raw_ptr + at).to(tl.float64) - raw_best
    else:
        height = tl.div_rn(tl.load(row_ptr + at).to(tl.float32) - best, divisor).to(tl.float64)
    logprob = tl.where(found, (height - log_mass).to(tl.float32), float("-inf"))
    tl.store(tokens_ptr + place, token, mask=wanted)
    tl.store(logprobs_ptr + place, logprob, mask=wanted)
# fmt: on


def _configuration(raw: torch.dtype, row: torch.dtype) -> Configuration:
    """raw, row: of the model's logits and of those after penalties."""
    signature = {
        "raw_ptr": f"*{_TYPES[raw]}", "row_ptr": f"*{_TYPES[row]}", "temperature_ptr": "*fp32",
        "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "seeds_ptr": "*i64",
        "positions_ptr": "*i64", "tokens_ptr": "*i64", "logprobs_ptr": "*fp32",
        "raw_stride": "i64", "row_stride": "i64", "vocab_size": "i32", "stream": "i32",
        "num_choices": "i32", "mode": "i32",
    }  # fmt: skip
    return Configuration(
        name=f"sample/sample/{_TYPES[raw]}-{_TYPES[row]}",
        kernel=sample_kernel,
        signature=signature,
        constants={"CHOICES": MAX_CHOICES, "BLOCK": BLOCK},
        num_warps=_NUM_WARPS,
        num_stages=1,
        needs_matrix=False,
    )


def configurations() -> list[Configuration]:
    """Every configuration that a launch can use."""
    pairs = [(raw, row) for raw in _TYPES for row in (raw, torch.float32)]
    shipped = [_configuration(raw, row) for raw, row in dict.fromkeys(pairs)]
    return [*shipped, penalty_configuration()]


def triton_sample(logits: Tensor, options: RowOptions, **constants: Any) -> SampleOutput:
    """As `sample`, without its checks.

    constants: in place of the shipped configuration's, for tests of other shapes.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    num_choices = options.num_choices
    tokens = torch.empty((num_rows, num_choices), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty((num_rows, num_choices), dtype=torch.float32, device=logits.device)
    if not num_rows:
        return SampleOutput(tokens, logprobs)
    rows = logits if options.penalties is None else triton_penalise(logits, options.penalties)
    config = _configuration(logits.dtype, rows.dtype)
    config.kernel[(num_rows,)](
        logits, rows, options.temperature, options.top_k, options.top_p, options.min_p,
        options.seeds, options.positions, tokens, logprobs, logits.stride(0), rows.stride(0),
        vocab_size, options.stream, num_choices, int(options.logprobs == "processed_logprobs"),
        **{**config.constants, **constants},
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return SampleOutput(tokens, logprobs)
