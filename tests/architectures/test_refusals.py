"""What cannot be served is refused at load: one line, which names the model and the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel

from specdec import LLM
from specdec.errors import ModelError
from specdec.model.architecture import load_config
from specdec.probe import probe
from specdec.runner import TargetRunner
from specdec.testing import tiny_llama
from tests.architectures.building import make_config
from tests.architectures.refusals import REFUSALS, Refusal

ids = [case.name for case in REFUSALS]


def make_refused(case: Refusal) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = make_config(case.config, case.fields)
        model: PreTrainedModel = getattr(transformers, case.model)(config)
    return model.float().eval()


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ModelError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSALS, ids=ids)
def test_a_loaded_module(case: Refusal) -> None:
    message = refusal(LLM, make_refused(case), max_model_len=32)
    assert case.says in message
    assert case.model in message


@pytest.mark.parametrize("case", REFUSALS, ids=ids)
def test_a_folder(case: Refusal, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_refused(case).save_pretrained(folder)
    message = refusal(LLM, folder, max_model_len=32)
    assert case.says in message or (case.config_says and case.config_says in message)
    assert str(folder) in message or case.model in message


@pytest.mark.parametrize(
    "case", [case for case in REFUSALS if case.by_config], ids=lambda case: case.name
)
def test_the_config_alone(case: Refusal, tmp_path: Path) -> None:
    make_config(case.config, case.fields).save_pretrained(tmp_path)
    message = refusal(load_config, tmp_path)
    assert (case.config_says or case.says) in message
    assert str(tmp_path) in message
    assert make_config(case.config, case.fields).model_type in message


@pytest.mark.parametrize(
    "case", [case for case in REFUSALS if case.unnamed_says], ids=lambda case: case.name
)
def test_what_the_config_does_not_tell_is_found(
    case: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config of tomorrow may name the same layers otherwise: running the model finds them."""
    monkeypatch.setattr("specdec.model.discover.check_servable", lambda config: None)
    message = refusal(LLM, make_refused(case), max_model_len=32)
    assert case.unnamed_says is not None
    assert case.unnamed_says in message
    assert case.model in message


# ---- one thing changed in a Llama ----


def patched_llama(monkeypatch: pytest.MonkeyPatch, **passed: Any) -> PreTrainedModel:
    """A Llama whose attention layers pass further arguments to the attention function."""
    forward = LlamaAttention.forward

    def patched(module: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs, **passed)

    monkeypatch.setattr(LlamaAttention, "forward", patched)
    return tiny_llama()


@pytest.mark.parametrize("name", ["position_bias", "alibi", "sinks", "block_indices"])
def test_an_argument_that_would_be_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched_llama(monkeypatch, **{name: torch.ones(6)})
    message = refusal(TargetRunner, model)
    assert f"LlamaAttention passes {name} to attention" in message
    assert message.startswith("LlamaForCausalLM cannot be served")


def test_an_argument_without_a_value_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched_llama(monkeypatch, position_bias=None)
    probe(model, TargetRunner(model), 64)


def test_sinks_that_are_not_one_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(TargetRunner, patched_llama(monkeypatch, s_aux=torch.ones(6, 2)))
    assert "attention sinks are of shape (6, 2)" in message


def test_attention_that_is_not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: None
    )
    message = refusal(TargetRunner, patched_llama(monkeypatch, is_causal=False))
    assert "lets every token see later ones" in message


def test_a_mask_of_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.zeros(1, 1, 1, 1)
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.create_causal_mask", lambda **_: own
    )
    message = refusal(TargetRunner, tiny_llama())
    assert "layer 0 puts something of its own into the attention mask" in message


def test_a_mask_that_comes_only_when_it_should_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built while masks are looked at, something afterwards."""

    def late(*, config: Any, **_: Any) -> torch.Tensor | None:
        return torch.zeros(1, 1, 1, 1) if config._attn_implementation == "specdec_tree" else None

    monkeypatch.setattr("transformers.models.llama.modeling_llama.create_causal_mask", late)
    assert "builds a mask of its own" in refusal(TargetRunner, tiny_llama())


def test_a_layer_without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    layer = model.get_submodule("model.layers.1.self_attn")
    monkeypatch.setattr(
        layer, "forward", lambda hidden_states, **_: (hidden_states, None), raising=True
    )
    message = refusal(TargetRunner, model)
    assert "1 of its 2 decoder layers call the attention function (layers [0])" in message


def test_positions_that_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaModel.forward

    def without_positions(module: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("position_ids", None)
        return forward(module, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", without_positions)
    model = tiny_llama()
    message = refusal(probe, model, TargetRunner(model), 64)
    assert message.endswith("it ignores the positions that rows are given")


def test_a_forward_that_takes_no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, input_ids, logits_to_keep: None)
    assert "it takes no position_ids" in refusal(TargetRunner, tiny_llama())


def test_a_forward_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("no such thing\nand more")

    monkeypatch.setattr(LlamaModel, "forward", broken)
    message = refusal(TargetRunner, tiny_llama())
    assert message.endswith("it does not run over flat rows (TypeError: no such thing)")
