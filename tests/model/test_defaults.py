"""What a checkpoint says about stopping, sampling and length."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from specdec.model import eos_token_ids, max_model_len, sampling_defaults
from tests.model import tiny


def generation(tmp_path: Path, **values: Any) -> GenerationConfig:
    """As it is read from a checkpoint's file."""
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return GenerationConfig.from_pretrained(tmp_path)


def test_eos_of_the_first_that_names_any(tmp_path: Path) -> None:
    config = tiny.llama_config(eos_token_id=[5, 6])
    tokenizer: Any = SimpleNamespace(eos_token_id=9)
    many = generation(tmp_path, eos_token_id=[2, 7, 7])
    assert eos_token_ids(many, config, tokenizer) == {2, 7}
    assert eos_token_ids(generation(tmp_path, eos_token_id=0), config, tokenizer) == {0}
    assert eos_token_ids(generation(tmp_path), config, tokenizer) == {5, 6}
    assert eos_token_ids(None, tiny.llama_config(eos_token_id=None), tokenizer) == {9}
    assert eos_token_ids(None, None, None) == frozenset()


def test_sampling_defaults(tmp_path: Path) -> None:
    recommended = generation(
        tmp_path,
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.1,
        max_new_tokens=64,
        eos_token_id=2,
    )
    assert sampling_defaults(recommended) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_tokens": 64,
    }


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"eos_token_id": 2, "do_sample": True},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    ],
)
def test_neutral_values_are_no_defaults(tmp_path: Path, values: dict[str, Any]) -> None:
    assert sampling_defaults(generation(tmp_path, **values)) == {}
    assert sampling_defaults(None) == {}


def test_explicitly_greedy(tmp_path: Path) -> None:
    greedy = generation(tmp_path, do_sample=False, temperature=0.6, repetition_penalty=1.2)
    assert sampling_defaults(greedy) == {"temperature": 0.0, "repetition_penalty": 1.2}


def test_max_model_len() -> None:
    from transformers import Gemma3Config, GPT2Config, MambaConfig

    assert max_model_len(tiny.llama_config()) == 128
    assert max_model_len(GPT2Config(n_positions=77)) == 77
    wrapper = Gemma3Config(text_config={"max_position_embeddings": 321})
    assert max_model_len(wrapper) == 321
    assert max_model_len(MambaConfig()) is None


def test_yarn_stretches() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    assert max_model_len(tiny.llama_config(rope_parameters=rope)) == 512
    extended = tiny.llama_config(rope_parameters=rope, max_position_embeddings=512)
    assert max_model_len(extended) == 512
