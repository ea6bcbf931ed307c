"""Sliding windows: row M1 of the reported faults, and windows too long for the probe to cross."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import MistralConfig, PreTrainedModel

from specdec import LLM, SamplingParams, Speculation
from specdec.errors import ModelError
from specdec.runner import TargetRunner
from specdec.testing import RandomDrafter, SelfDrafter, reference_generate
from tests.architectures.building import model_from

TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def mistral(window: int, implementation: str, context: int = 128) -> PreTrainedModel:
    config = MistralConfig(**TINY, sliding_window=window, max_position_embeddings=context)
    model = model_from(config)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("shape", [4, (4, 2, 1, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["SELF", "RANDOM"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_m1_drafting_past_the_window(implementation: str, kind: str, shape: Any) -> None:
    """M1: once the window is reached, speculation crashed (eager) or changed the text (SDPA).

    The draft of SELF is the target itself, so both have the window.
    """
    model = mistral(8, implementation)
    drafter = SelfDrafter(model, shape) if kind == "SELF" else RandomDrafter(256, shape)
    prompt = [7, 3, 250, 99, 12, 54]
    output = LLM(model, draft=drafter).generate(
        prompt,
        SamplingParams(temperature=0.0, max_tokens=40),
        speculation=Speculation(mode="fixed", max_nodes=24),
    )[0]
    assert list(output.token_ids) == reference_generate(model, prompt, 40)
    assert output.stats.num_draft_tokens > 30
    if kind == "SELF":
        assert output.stats.num_accepted_draft_tokens > 25


def test_a_window_beyond_the_probe_is_known() -> None:
    assert TargetRunner(mistral(5000, "sdpa", 8192)).windows == {5000}


@pytest.mark.parametrize("told", [None, 4999, 5001])
def test_a_window_that_attention_is_not_told_is_refused(
    told: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No probe would see it: its texts end long before 5000 tokens."""
    model = mistral(5000, "sdpa", 8192)
    _tell(monkeypatch, model, told)
    with pytest.raises(ModelError) as caught:
        TargetRunner(model)
    reason = "mask shows more" if told == 4999 else "window or chunk of 5000 tokens"
    assert "MistralForCausalLM cannot be served: layer 0" in str(caught.value)
    assert reason in str(caught.value)


def test_a_window_as_long_as_the_context_need_not_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3.5-MoE has such a one, in its mask alone."""
    model = mistral(128, "sdpa", 128)
    _tell(monkeypatch, model, None)
    assert TargetRunner(model).windows == set()


def _tell(monkeypatch: pytest.MonkeyPatch, model: Any, window: int | None) -> None:
    """Let attention layers be told another window than the one in the mask."""
    attention = type(model.model.layers[0].self_attn)
    forward = attention.forward

    def told_otherwise(module: Any, *args: Any, **kwargs: Any) -> Any:
        config, module.config = module.config, _WithWindow(module.config, window)
        try:
            return forward(module, *args, **kwargs)
        finally:
            module.config = config

    monkeypatch.setattr(attention, "forward", told_otherwise)


class _WithWindow:
    """A config that gives another sliding_window."""

    def __init__(self, config: Any, window: int | None) -> None:
        self._config = config
        self.sliding_window = window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
