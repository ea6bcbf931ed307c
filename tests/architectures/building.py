"""From a case to a model, its prompts and its reference answers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec import LLM, Speculation
from specdec.testing import OracleDrafter, RandomDrafter, reference_generate
from tests.architectures.cases import KINDS, VOCAB_SIZE, Case

NUM_TOKENS = 20
LENGTHS = (37, 6, 52, 19)
"""Of the prompts: all but one longer than every window, and the answers pass it in the end."""

SMALLEST_GAP = 3e-4
"""Between the best two logits, relative to the best: a hundred times what rounding does to them."""


def make_config(name: str, fields: Mapping[str, Any]) -> Any:
    """The config of that class of transformers."""
    return getattr(transformers, name)(**fields)


def make_model(case: Case) -> PreTrainedModel:
    """The seeded tiny model of a case, fp32, in eval mode."""
    return model_from(make_config(case.config, {**case.common, **case.fields}), case.seed)


def model_from(config: Any, seed: int = 0) -> PreTrainedModel:
    """A seeded random model; the global random state is left as it was.

    Norms, biases and sinks get random values too: fresh models have ones and zeros, which would
    hide one that is dropped.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        model.float().eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


@dataclass
class Served:
    """A case's model behind one engine that has all drafts loaded."""

    case: Case
    model: PreTrainedModel

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Random tokens; longer ones end in a phrase that repeats, for n-gram drafts to find."""
        rng = random.Random(self.case.name)
        prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
        return [
            [*prompt[:-15], *(3 * prompt[:5])] if len(prompt) > 15 else prompt for prompt in prompts
        ]

    @cached_property
    def answers(self) -> dict[tuple[int, ...], list[int]]:
        """Greedy answers of transformers' generate, by prompt."""
        return {
            tuple(prompt): reference_generate(self.model, prompt, NUM_TOKENS)
            for prompt in self.prompts
        }

    @cached_property
    def llm(self) -> LLM:
        drafts = [
            "ngram",
            RandomDrafter(VOCAB_SIZE, name="random-tree"),
            OracleDrafter(self.answers, VOCAB_SIZE, (3, 2, 2), name="self-tree"),
        ]
        return LLM(self.model, draft=drafts, num_pages=64, generation_config="none")

    def speculation(self, kind: str) -> Speculation:
        assert kind in KINDS
        if kind == "none":
            return Speculation(mode="off")
        return Speculation(mode="fixed", max_nodes=16, max_depth=8, drafts=[kind])

    def smallest_gap(self) -> float:
        """Between the best two logits along the answers, relative to the best."""
        gaps = []
        for prompt, answer in self.answers.items():
            rows = stock_logits(self.model, [*prompt, *answer])[len(prompt) - 1 : -1]
            best = rows.topk(2).values
            gaps.append(float(((best[:, 0] - best[:, 1]) / best[:, 0].abs()).min()))
        return min(gaps)


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[S, V] logits of one text, from the module as it is."""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
