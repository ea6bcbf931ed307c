"""Targets that the exactness tests share: building one is cheap, running its reference is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedModel

from specdec.testing import random_prompts, reference_generate, tiny_llama
from tests.threads import one_thread_for_tiny_models  # noqa: F401

NUM_PROMPTS, NUM_TOKENS = 50, 64
QUESTIONS = [
    f"{verb} {thing}."
    for verb in ("Describe", "Explain to a child", "Write two lines about", "List facts about",
                 "Ask a question about")
    for thing in ("rain", "a bicycle", "bread", "the moon", "a library", "sorting a list",
                  "honey bees", "tea", "a suspension bridge", "chess")
]  # fmt: skip


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="session")
def tiny_prompts() -> list[list[int]]:
    return random_prompts(NUM_PROMPTS)


@pytest.fixture(scope="session")
def tiny_answers(
    tiny: PreTrainedModel, tiny_prompts: list[list[int]]
) -> dict[tuple[int, ...], list[int]]:
    """Plain transformers greedy answers, by prompt."""
    return {tuple(p): reference_generate(tiny, p, NUM_TOKENS) for p in tiny_prompts}


@pytest.fixture(scope="session")
def smol_prompts(smol_path: Path) -> list[list[int]]:
    """50 chat prompts as ids."""
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
