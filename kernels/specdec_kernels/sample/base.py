"""Records of `sample`: what changes the rows, how they are judged, what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MAX_CHOICES = 16
MAX_VOCAB_SIZE = 1 << 20

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


@dataclass(frozen=True, eq=False)
class Penalties:
    """Per row the tokens whose logits change before temperature and filters, and how.

    Row j's tokens are entries cu_tokens[j] .. cu_tokens[j + 1] - 1 of the lists. In this order, all
    in fp32: the entry's bias is added; if the token occurs in prompt or output, a positive logit is
    divided by `repetition[j]` and another one multiplied by it (CTRL, Keskar et al. 2019); if it
    occurs in the output, `presence[j]` and then `frequency[j] * count` are subtracted.

    cu_tokens: int32 [J + 1]. token_ids: int64 [N], 0 .. V - 1, distinct within a row.
    output_counts: int32 [N], how often the token occurs in the output; 0 for one of the prompt
    alone, -1 for one of neither. bias: fp32 [N]. repetition (1 = off), presence, frequency (0 =
    off): fp32 [J].
    """

    cu_tokens: Tensor
    token_ids: Tensor
    output_counts: Tensor
    bias: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        biases: Sequence[Mapping[int, float]],
        *,
        repetition: Sequence[float],
        presence: Sequence[float],
        frequency: Sequence[float],
        device: torch.device | str = "cpu",
    ) -> Penalties:
        """From one entry per row: prompt and output so far (a node's own path included), biases.

        Raises ValueError if the lists differ in length.
        """
        lists = (prompts, outputs, biases, repetition, presence, frequency)
        if len({len(entries) for entries in lists}) != 1:
            raise ValueError("penalties: every list needs one entry per row")
        cu_tokens: list[int] = [0]
        ids: list[int] = []
        counts: list[int] = []
        values: list[float] = []
        for prompt, output, bias in zip(prompts, outputs, biases, strict=True):
            entries = dict.fromkeys(bias, -1) | dict.fromkeys(prompt, 0) | Counter(output)
            ids += entries.keys()
            counts += entries.values()
            values += [bias.get(token, 0.0) for token in entries]
            cu_tokens.append(len(ids))

        def tensor(data: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(data, dtype=dtype).to(device)

        return cls(
            cu_tokens=tensor(cu_tokens, torch.int32),
            token_ids=tensor(ids, torch.int64),
            output_counts=tensor(counts, torch.int32),
            bias=tensor(values, torch.float32),
            repetition=tensor(repetition, torch.float32),
            presence=tensor(presence, torch.float32),
            frequency=tensor(frequency, torch.float32),
        )


class RowOptions(NamedTuple):
    """The checked arguments of `sample` beside the logits."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    stream: int
    penalties: Penalties | None
    num_choices: int
    logprobs: LogprobsMode


class SampleOutput(NamedTuple):
    """token_ids: int64, logprobs: fp32; both [J], or [J, k] where k choices were asked for."""

    token_ids: Tensor
    logprobs: Tensor
