"""Bias and penalties as one Triton program per row; imported only by `sample`'s Triton form."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.configuration import Configuration
from specdec_kernels.sample.base import Penalties


# fmt: off
@triton.jit
def _product(a, b, count):
    """a * b in fp32 where count >= 0, rounded by itself.

    A compiler fuses a product with the subtraction that follows, which rounds once less, even if
    the product is made in fp64. It cannot see that these bits are changed by nothing.
    """
    bits = (a * b).to(tl.int32, bitcast=True) ^ (count >> 31)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["vocab_size"])
def penalty_kernel(
    rows_ptr, cu_tokens_ptr, token_ids_ptr, counts_ptr, bias_ptr, repetition_ptr, presence_ptr,
    frequency_ptr, row_stride, vocab_size, BLOCK: tl.constexpr,
):
    j = tl.program_id(0).to(tl.int64)
    rows_ptr += j * row_stride
    repetition = tl.load(repetition_ptr + j)
    presence = tl.load(presence_ptr + j)
    frequency = tl.load(frequency_ptr + j)
    end = tl.load(cu_tokens_ptr + j + 1)
    for base in range(tl.load(cu_tokens_ptr + j), end, BLOCK):
        at = base + tl.arange(0, BLOCK)
        listed = at < end
        token = tl.load(token_ids_ptr + at, mask=listed, other=-1)
        listed = listed & (token >= 0) & (token < vocab_size)
        count = tl.load(counts_ptr + at, mask=listed, other=-1)
        logit = tl.load(rows_ptr + token, mask=listed, other=0.0)
        logit += tl.load(bias_ptr + at, mask=listed, other=0.0)
        times = _product(logit, repetition, count)
        weaker = tl.where(logit > 0, tl.div_rn(logit, repetition), times)
        logit = tl.where(count >= 0, weaker, logit)
        less = logit - presence - _product(count.to(tl.float32), frequency, count)
        logit = tl.where(count > 0, less, logit)
        tl.store(rows_ptr + token, logit, mask=listed)
# fmt: on


def penalty_configuration() -> Configuration:
    """The one configuration of the kernel."""
    fp32 = ["rows_ptr", "bias_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr"]
    return Configuration(
        name="sample/penalty/fp32",
        kernel=penalty_kernel,
        signature={
            **dict.fromkeys(fp32, "*fp32"),
            "cu_tokens_ptr": "*i32",
            "token_ids_ptr": "*i64",
            "counts_ptr": "*i32",
            "row_stride": "i64",
            "vocab_size": "i32",
        },
        constants={"BLOCK": 256},
        num_warps=4,
        num_stages=1,
        needs_matrix=False,
    )


def triton_penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """A copy of the rows in fp32, changed as `Penalties` says."""
    rows = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    rows.copy_(logits)
    config = penalty_configuration()
    config.kernel[(rows.shape[0],)](
        rows, penalties.cu_tokens, penalties.token_ids, penalties.output_counts, penalties.bias,
        penalties.repetition, penalties.presence, penalties.frequency, rows.stride(0),
        rows.shape[1],
        **config.constants, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return rows
