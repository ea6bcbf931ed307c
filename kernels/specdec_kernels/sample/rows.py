"""The reference form of `sample`: its rows one after the other through the numpy meaning."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec_kernels.sample.base import Penalties, RowOptions, SampleOutput
from specdec_kernels.sample.philox import philox_words
from specdec_kernels.sample.reference import choose_token, gumbel_noise, surviving_tokens

Floats = NDArray[np.float32]

_U64 = 2**64 - 1


def reference_sample(logits: Tensor, options: RowOptions) -> SampleOutput:
    """As `sample`, without its checks; results are made on the CPU and moved."""
    raw = logits.float().numpy(force=True)
    rows = raw.copy()
    if options.penalties is not None:
        penalise(rows, options.penalties)
    host = [tensor.tolist() for tensor in options[:6]]
    choices, logprobs = [], []
    for row, raw_row, temperature, top_k, top_p, min_p, seed, position in zip(
        rows, raw, *host, strict=True
    ):
        filters = (temperature, top_k, top_p, min_p)
        key = (seed & _U64, options.stream, position & _U64)
        try:
            ids = _best_tokens(row, filters, key, options.num_choices)
            judged = raw_row if options.logprobs == "raw_logprobs" else _filtered(row, filters)
            found = _log_softmax(judged)[ids]
        except ValueError:  # the row is not finite
            ids, found = np.empty(0, dtype=np.int64), np.empty(0)
        missing = (0, options.num_choices - len(ids))
        choices.append(np.pad(ids, missing, constant_values=-1))
        logprobs.append(np.pad(found, missing, constant_values=-np.inf))
    shape = (len(rows), options.num_choices)
    return SampleOutput(
        torch.from_numpy(np.array(choices, dtype=np.int64).reshape(shape)).to(logits.device),
        torch.from_numpy(np.array(logprobs, dtype=np.float32).reshape(shape)).to(logits.device),
    )


def _best_tokens(
    row: Floats,
    filters: tuple[float, int, float, float],
    key: tuple[int, int, int],
    num_choices: int,
) -> NDArray[np.int64]:
    """Up to num_choices surviving tokens, largest score first; equal ones by id."""
    temperature, top_k, top_p, min_p = filters
    seed, stream, position = key
    first = choose_token(
        row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        position=position, stream=stream,
    )  # fmt: skip
    if num_choices == 1:
        return np.array([first], dtype=np.int64)
    if temperature == 0.0:
        kept = np.flatnonzero(row > -np.inf)
        scores = row[kept]
    else:
        kept, scaled = surviving_tokens(row, temperature, top_k, top_p, min_p)
        scores = scaled + gumbel_noise(philox_words(seed, stream, position, len(row))[kept])
    return kept[np.lexsort((kept, -scores))][:num_choices]


def _filtered(row: Floats, filters: tuple[float, int, float, float]) -> Floats:
    """The logits over the temperature, relative to the largest, filtered tokens at -inf."""
    if filters[0] == 0.0:
        return row
    kept, scaled = surviving_tokens(row, *filters)
    judged = np.full_like(row, -np.inf)
    judged[kept] = scaled
    return judged


def _log_softmax(row: Floats) -> NDArray[np.float64]:
    """In fp64, so that the result is independent of summation order to fp32 accuracy."""
    above = row.astype(np.float64) - float(row.max())
    shifted: NDArray[np.float64] = above - np.log(np.exp(above).sum())
    return shifted


def penalise(rows: Floats, penalties: Penalties) -> None:
    """Changes the rows, float32 [J, V], in place as `Penalties` says."""
    starts = penalties.cu_tokens.tolist()
    ids, counts, bias = (
        tensor.numpy(force=True)
        for tensor in (penalties.token_ids, penalties.output_counts, penalties.bias)
    )
    repetition, presence, frequency = (
        tensor.numpy(force=True)
        for tensor in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    for j, row in enumerate(rows):
        entries = slice(starts[j], starts[j + 1])
        tokens, count = ids[entries], counts[entries]
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            row[tokens] += bias[entries]
            seen = tokens[count >= 0]
            old = row[seen]
            row[seen] = np.where(old > 0, old / repetition[j], old * repetition[j])
        used = tokens[count > 0]
        row[used] -= presence[j]
        row[used] -= frequency[j] * count[count > 0].astype(np.float32)
