"""Entry point of sample: validation and choice of form."""

from __future__ import annotations

from typing import cast, get_args

import torch
from torch import Tensor

from specdec_kernels.dispatch import Impl, choose
from specdec_kernels.sample.base import (
    MAX_CHOICES,
    MAX_VOCAB_SIZE,
    LogprobsMode,
    Penalties,
    RowOptions,
    SampleOutput,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    stream: int = 0,
    penalties: Penalties | None = None,
    num_choices: int | None = None,
    logprobs: LogprobsMode = "raw_logprobs",
    impl: Impl = "auto",
) -> SampleOutput:
    """The law's token of every row, or a draft's best children: z / T + noise, largest first.

    logits: [J, V], fp32, bf16 or fp16, the model's own; V up to 2**20. temperature: fp32 [J], 0 =
    argmax of the row after penalties, whatever the filters. top_k: int32 [J], 0 = off. top_p (1 =
    off), min_p (0 = off): fp32 [J], both in 0..1. seeds, positions: int64 [J] used as uint64, the
    request's seed and the absolute position of the token that is chosen. stream: 0 the law, 1
    drafts. penalties: one entry per row. A row's result depends on nothing but its own entries.

    The meaning of a row is `choose_token` after `Penalties`, in fp32: ties go to the lowest id, a
    tie with the k-th is kept, top-p removes the lightest first and the highest id among equals.
    The noise is the same in drafts of the same seed, position and stream, which is what makes the
    children that are best under it likely to be chosen by the target.

    num_choices: k in 1..16 for the k best tokens of each row, the best first, instead of the one.
    logprobs: "raw_logprobs", log-softmax of `logits`; or "processed_logprobs", of what the
    penalties, the temperature and the filters leave.

    Returns token_ids int64 and logprobs fp32, [J] or [J, k]. A token is -1 and its log-probability
    -inf where `choose_token` raises (the row after penalties has a NaN, a +inf or nothing finite)
    and where fewer than k tokens survive. No argument is changed. Forms may differ in a token where
    two scores, or a mass and the boundary of top-p, differ by rounding.

    Raises ValueError naming the argument if a shape, dtype, device or size is not as above. Values
    of tensors are checked where they lie on the CPU; on a GPU, token ids of penalties outside
    0 .. V - 1 are passed over.
    """
    _check_logits(logits)
    rows, device = logits.shape[0], logits.device
    if top_k is None:
        top_k = torch.zeros(rows, dtype=torch.int32, device=device)
    if top_p is None:
        top_p = torch.ones(rows, dtype=torch.float32, device=device)
    if min_p is None:
        min_p = torch.zeros(rows, dtype=torch.float32, device=device)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    ):
        _check_tensor(name, tensor, dtype, rows, device)
    if device.type == "cpu":
        _check_values(temperature, top_k, top_p, min_p)
    if not 0 <= stream <= 2:
        raise ValueError(f"stream: must be 0 (the law), 1 (drafts) or 2 (coins), got {stream}")
    if num_choices is not None and not 1 <= num_choices <= MAX_CHOICES:
        raise ValueError(f"num_choices: must lie in 1..{MAX_CHOICES}, got {num_choices}")
    if logprobs not in get_args(LogprobsMode):
        names = " or ".join(f'"{name}"' for name in get_args(LogprobsMode))
        raise ValueError(f"logprobs: must be {names}, got {logprobs!r}")
    if penalties is not None:
        _check_penalties(penalties, logits)
    options = RowOptions(
        temperature, top_k, top_p, min_p, seeds, positions, stream, penalties, num_choices or 1,
        logprobs,
    )  # fmt: skip
    output = cast("SampleOutput", choose("sample", impl, device)(logits.detach(), options))
    if num_choices is None:
        return SampleOutput(output.token_ids[:, 0], output.logprobs[:, 0])
    return output


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_VOCAB_SIZE:
        raise ValueError(
            f"logits: must be [J, V] with V in 1..{MAX_VOCAB_SIZE}, got {tuple(logits.shape)}"
        )
    if logits.dtype not in _DTYPES:
        raise ValueError(f"logits: must be float32, bfloat16 or float16, got {logits.dtype}")


def _check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, length: int, device: torch.device
) -> None:
    if tensor.dtype != dtype or tensor.shape != (length,):
        raise ValueError(
            f"{name}: must be {dtype} [{length}], got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name}: must be on the logits' device {device}, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous; call .contiguous() on it")


def _check_values(temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    for name, tensor, high in (
        ("temperature", temperature, float("inf")),
        ("top_k", top_k, float("inf")),
        ("top_p", top_p, 1.0),
        ("min_p", min_p, 1.0),
    ):
        wrong = ~((tensor >= 0) & (tensor <= high))
        if wrong.any():
            row = int(wrong.nonzero()[0])
            limit = "0 or more" if high > 1 else "in 0..1"
            raise ValueError(f"{name}: must be {limit}, got {tensor[row].item()} in row {row}")


def _check_penalties(penalties: Penalties, logits: Tensor) -> None:
    rows, vocab_size = logits.shape
    entries = penalties.token_ids.numel()
    for name, dtype, length in (
        ("cu_tokens", torch.int32, rows + 1),
        ("token_ids", torch.int64, entries),
        ("output_counts", torch.int32, entries),
        ("bias", torch.float32, entries),
        ("repetition", torch.float32, rows),
        ("presence", torch.float32, rows),
        ("frequency", torch.float32, rows),
    ):
        tensor = getattr(penalties, name)
        _check_tensor(f"penalties.{name}", tensor, dtype, length, logits.device)
    if logits.device.type != "cpu":
        return
    ids, cu_tokens = penalties.token_ids, penalties.cu_tokens.long()
    if cu_tokens[0] != 0 or cu_tokens[-1] != entries or (cu_tokens.diff() < 0).any():
        raise ValueError(f"penalties.cu_tokens: must rise from 0 to the {entries} entries")
    if entries and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"penalties.token_ids: must lie in 0..{vocab_size - 1}")
    owners = torch.repeat_interleave(torch.arange(rows), cu_tokens.diff())
    if (owners * vocab_size + ids).unique().numel() != entries:
        raise ValueError("penalties.token_ids: must be distinct within a row")
