"""The private skeleton leaves the user's module alone; what cannot be served is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from specdec import LLM, SamplingParams, Speculation
from specdec.errors import ModelError
from specdec.model.skeleton import make_skeleton
from specdec.probe import probe
from specdec.runner import TargetRunner
from specdec.testing import random_prompts, reference_generate, tiny_gpt2, tiny_llama, tiny_qwen2

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_the_skeleton_shares_weights_and_nothing_else() -> None:
    model = tiny_llama().train()
    implementation = model.config._attn_implementation
    skeleton, _ = make_skeleton(model)
    for (name, ours), (_, theirs) in zip(
        skeleton.named_parameters(), model.named_parameters(), strict=True
    ):
        assert ours is theirs, name
    assert skeleton.config is not model.config
    assert model.config._attn_implementation == implementation
    assert model.training
    assert not skeleton.training


def test_tied_embeddings_stay_tied() -> None:
    model = tiny_gpt2()
    skeleton, _ = make_skeleton(model)
    embeddings = skeleton.get_input_embeddings()
    assert embeddings.weight is skeleton.get_output_embeddings().weight


def test_the_users_module_still_generates_while_an_engine_uses_it() -> None:
    model = tiny_llama()
    (prompt,) = random_prompts(1, longest=9)
    before = reference_generate(model, prompt, 10)
    llm = LLM(model)
    out = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=10))[0]
    assert list(out.token_ids) == list(before) == list(reference_generate(model, prompt, 10))


def test_a_module_in_training_mode_is_served_and_left_so() -> None:
    model = tiny_gpt2()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    assert len(LLM(model).generate([1, 2], SamplingParams(max_tokens=3))[0].token_ids) == 3
    assert all(module.training for module in model.modules())


def test_a_skeleton_cannot_be_called_outside_a_step() -> None:
    runner = TargetRunner(tiny_llama())
    with pytest.raises(RuntimeError, match="belongs to a specdec engine"):
        runner._module(input_ids=torch.tensor([[1, 2]]), use_cache=False)


@pytest.mark.parametrize(
    "model",
    [
        FalconForCausalLM(FalconConfig(**TINY)),
        BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_whose_attention_never_calls_us_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match=type(model).__name__) as caught:
        LLM(model, max_model_len=64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make", [tiny_llama, tiny_gpt2, tiny_qwen2], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("attention", ["reference", "cpu"])
def test_the_probe_passes_what_follows_the_rows(make: Any, attention: str) -> None:
    model = make()
    probe(model, TargetRunner(model, attention), 200)


def mistral(window: int) -> PreTrainedModel:
    config = MistralConfig(
        **TINY, intermediate_size=64, num_key_value_heads=2, sliding_window=window,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MistralForCausalLM(config).eval()


def test_the_probe_crosses_sliding_windows() -> None:
    model = mistral(8)
    runner = TargetRunner(model)
    assert runner.windows == {8}
    probe(model, runner, 128)
    # The same weights without the window must not pass for it.
    wide = mistral(4096)
    wide.load_state_dict(model.state_dict())
    with pytest.raises(ModelError, match="flat batch"):
        probe(wide, runner, 128)


def test_sliding_window_greedy_text_is_transformers() -> None:
    model = mistral(8)
    llm = LLM(model, max_model_len=128)
    prompts = random_prompts(4, vocab_size=64, longest=30)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outs = llm.generate(prompts, params, speculation=Speculation(mode="fixed"))
    for prompt, out in zip(prompts, outs, strict=True):
        assert list(out.token_ids) == list(reference_generate(model, prompt, 40))


def test_positions_that_are_ignored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    runner = TargetRunner(model)
    forward = runner._module.forward

    def without_positions(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("position_ids")
        return forward(*args, **kwargs)

    monkeypatch.setattr(runner._module, "forward", without_positions)
    with pytest.raises(ModelError, match="positions"):
        probe(model, runner, 200)
