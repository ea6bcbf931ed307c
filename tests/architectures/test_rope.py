"""Rotary types whose frequencies depend on the batch are served where the scaling is not active."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, Phi3Config, PreTrainedModel

from specdec import LLM, SamplingParams, Speculation
from specdec.errors import InvalidRequestError
from specdec.model import max_model_len
from specdec.model.defaults import length_reason
from specdec.testing import RandomDrafter, random_prompts, reference_generate, tiny_llama
from tests.architectures.building import make_model
from tests.architectures.cases import CASES

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def case_model(name: str) -> PreTrainedModel:
    return make_model(next(case for case in CASES if case.name == name))


@pytest.mark.parametrize(
    ("name", "limit", "kind"),
    [("llama-dynamic", 128, "dynamic"), ("phi3-longrope", 96, "longrope")],
)
def test_the_context_ends_where_scaling_begins(name: str, limit: int, kind: str) -> None:
    model = case_model(name)
    with pytest.raises(InvalidRequestError) as caught:
        LLM(model, max_model_len=limit + 1)
    assert f"the model's context has {limit} tokens, got {limit + 1}" in str(caught.value)
    assert f"{kind} rotary frequencies depend on the longest text of a batch" in str(caught.value)


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_text_up_to_the_last_position(name: str) -> None:
    """The longest text ends at the limit while trees are drafted beside shorter ones."""
    model = case_model(name)
    llm = LLM(model, draft=RandomDrafter(256, (2, 2, 1, 1)), num_pages=32)
    limit = llm.engine.max_model_len
    prompts = random_prompts(3, vocab_size=256, longest=20, seed=1)
    prompts.append(random_prompts(1, vocab_size=256, longest=1)[0] * (limit - 12))
    counts = [20, 20, 20, 12]
    outputs = llm.generate(
        prompts,
        [SamplingParams(temperature=0.0, max_tokens=count) for count in (20, 20, 20, 99)],
        speculation=Speculation(mode="fixed"),
    )
    for prompt, output, count in zip(prompts, outputs, counts, strict=True):
        assert list(output.token_ids) == reference_generate(model, prompt, count)


def test_limits_by_config() -> None:
    nested: dict[str, Any] = {
        "full_attention": {
            "rope_type": "longrope", "original_max_position_embeddings": 40, "rope_theta": 1e4,
            **FACTORS,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    config = LlamaConfig(max_position_embeddings=64)
    assert max_model_len(config) == 64
    assert length_reason(config) is None
    config.rope_parameters = nested
    assert max_model_len(config) == 40
    assert "longrope" in str(length_reason(config))


def test_longrope_without_a_length_of_its_own() -> None:
    phi = Phi3Config(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64,
        original_max_position_embeddings=64, pad_token_id=None,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **FACTORS},
    )  # fmt: skip
    assert max_model_len(phi) == 64


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_other_types_have_no_limit_of_their_own(kind: str) -> None:
    extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    model = tiny_llama(
        rope_parameters={
            "rope_type": kind, "factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 32, **extra,
        }
    )  # fmt: skip
    assert max_model_len(model.config) == 256
    assert length_reason(model.config) is None
