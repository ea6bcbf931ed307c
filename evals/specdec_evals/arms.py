"""The things compared: each turns a prompt into a timed greedy answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specdec.request import SamplingParams, Speculation

if TYPE_CHECKING:
    from pathlib import Path

    from specdec.llm import LLM

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer and its times.

    token_ids: emitted tokens, an ending EOS included. start, first, last: seconds on one clock when
    the request was made, and when the first and the last token were there.
    num_decode_passes: target passes after the first token.
    """

    token_ids: tuple[int, ...]
    start: float
    first: float
    last: float
    num_decode_passes: int

    @property
    def tokens_per_second(self) -> float | None:
        """(n - 1) / (last - first), None for fewer than two tokens or no time between them."""
        elapsed = self.last - self.first
        return (len(self.token_ids) - 1) / elapsed if elapsed > 0 else None

    @property
    def end_to_end_tokens_per_second(self) -> float:
        """Emitted tokens over the whole time, the prompt's included."""
        return len(self.token_ids) / (self.last - self.start)


class Arm(Protocol):
    """One of the things compared. dtype: of the weights, "bf16", "fp16" or "fp32"."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Answer: ...


class SpecdecArm:
    """An LLM with one speculation setting; every answer starts cold."""

    def __init__(self, llm: LLM, name: str, dtype: str, speculation: Speculation) -> None:
        self.llm = llm
        self.name = name
        self.dtype = dtype
        self.speculation = speculation

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Greedy answer of at most max_tokens tokens, after reset_state()."""
        self.llm.reset_state()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        (output,) = self.llm.generate(
            [list(prompt_token_ids)], params, speculation=self.speculation
        )
        stats = output.stats
        return Answer(
            token_ids=output.token_ids,
            start=stats.arrival_time,
            first=stats.first_token_time,
            last=stats.last_token_time,
            num_decode_passes=stats.num_decode_passes,
        )


class _TokenClock(BaseStreamer):
    """Keeps the tokens that generate() hands out and the time each came; the prompt comes first."""

    def __init__(self) -> None:
        self.prompt_seen = False
        self.token_ids: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        now = time.perf_counter()
        for token in value.reshape(-1).tolist():
            self.token_ids.append(token)
            self.times.append(now)

    def end(self) -> None:
        """Nothing is held back."""


class TransformersArm:
    """transformers' own generate(), greedy, one prompt at a time."""

    def __init__(self, model: PreTrainedModel, name: str, dtype: str) -> None:
        self.model = model
        self.name = name
        self.dtype = dtype

    @classmethod
    def load(cls, path: Path, dtype: str, name: str = "transformers") -> TransformersArm:
        """The checkpoint in the folder `path`, weights in dtype, on the CPU."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
        return cls(model.eval(), name, dtype)

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Greedy answer of at most max_tokens tokens."""
        ids = torch.tensor([list(prompt_token_ids)])
        clock = _TokenClock()
        start = time.perf_counter()
        generate: Any = self.model.generate  # its type names a tensor, for a decorator's sake
        with torch.inference_mode():
            generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                streamer=clock,
            )
        return Answer(
            token_ids=tuple(clock.token_ids),
            start=start,
            first=clock.times[0],
            last=clock.times[-1],
            num_decode_passes=len(clock.token_ids) - 1,
        )


def faster_transformers(
    path: Path, prompts: Sequence[Sequence[int]], *, dtypes: Sequence[str], max_tokens: int
) -> tuple[TransformersArm, dict[str, float]]:
    """The faster of transformers' dtypes on prompts, and the median tokens/s of each.

    The first prompt warms up and does not count if there are others. One model is held at a time
    beside the best one so far.
    """
    best: TransformersArm | None = None
    speeds: dict[str, float] = {}
    for dtype in dtypes:
        arm = TransformersArm.load(path, dtype)
        answers = [arm.answer(prompt, max_tokens) for prompt in prompts]
        timed = [answer.tokens_per_second or 0.0 for answer in answers[1:] or answers]
        speeds[dtype] = float(np.median(timed))
        if best is None or speeds[dtype] > speeds[best.dtype]:
            best = arm
    if best is None:
        raise ValueError("no dtype to choose from")
    return best, speeds
