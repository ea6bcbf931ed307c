"""Loading: dtype, mode, tokenizer, memory, and refusing what would run wrongly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from specdec.model import from_module, load_model
from specdec.model.load import parse_dtype, weights_bytes
from specdec.model.memory import available_memory
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("cache")


def test_loads_for_inference(llama: Path) -> None:
    loaded = load_model(llama)
    assert loaded.path == loaded.model_path() == llama
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.tokenizer is not None
    assert loaded.generation_config.eos_token_id == 2


def test_shards_equal_one_file(llama: Path, sharded: Path) -> None:
    whole, parts = load_model(llama), load_model(sharded)
    assert parts.tokenizer is None
    expected = whole.model.state_dict()
    for name, weight in parts.model.state_dict().items():
        assert torch.equal(weight, expected[name])


@pytest.mark.parametrize("dtype", ["fp32", "FLOAT32", "torch.float32", torch.float32])
def test_dtype_spellings(llama: Path, dtype: str | torch.dtype) -> None:
    assert load_model(llama, dtype=dtype).model.dtype == torch.float32


def test_dtype_auto_is_the_checkpoints(llama: Path, tmp_path: Path) -> None:
    tiny.llama().to(torch.float32).save_pretrained(tmp_path / "fp32")
    assert load_model(tmp_path / "fp32").model.dtype == torch.float32
    assert load_model(tmp_path / "fp32", dtype="bf16").model.dtype == torch.bfloat16
    assert parse_dtype("auto") is None
    assert parse_dtype("half") == torch.float16


def test_unknown_dtype_and_device(llama: Path) -> None:
    assert "dtype 'int4' is not supported: use auto" in tiny.error_line(
        load_model, llama, dtype="int4"
    )
    assert "dtype 'int8'" in tiny.error_line(load_model, llama, dtype=torch.int8)
    assert "device 'tpu9' is unknown" in tiny.error_line(load_model, llama, device="tpu9")
    if not torch.cuda.is_available():
        assert "sees no GPU" in tiny.error_line(load_model, llama, device="cuda")


def test_weights_bytes(llama: Path, sharded: Path) -> None:
    stored = sum(weight.nbytes for weight in tiny.llama().parameters())
    assert weights_bytes(llama) == weights_bytes(sharded) == stored
    assert weights_bytes(llama, torch.float32) == 2 * stored


def test_too_little_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = weights_bytes(llama, torch.float32)
    monkeypatch.setattr("specdec.model.memory.available_memory", lambda: need - 1)
    message = tiny.error_line(load_model, llama, dtype="fp32")
    assert message.startswith("loading llama needs 0.1 MiB of memory and 0.1 MiB are free: close")
    assert load_model(llama, dtype="bf16").model.dtype == torch.bfloat16


def test_available_memory_is_plausible() -> None:
    assert 1 << 20 < available_memory() < 1 << 50


def test_weights_of_another_config(llama: Path) -> None:
    tiny.edit_json(llama / "config.json", num_hidden_layers=3)
    message = tiny.error_line(load_model, llama)
    assert "lacks 9 of the weights that its config asks for, model.layers.2." in message
    tiny.edit_json(llama / "config.json", num_hidden_layers=2, intermediate_size=48)
    assert "check that the weights belong to the config" in tiny.error_line(load_model, llama)


def test_untied_head_missing(llama: Path) -> None:
    tiny.edit_json(llama / "config.json", tie_word_embeddings=False)
    assert "lm_head.weight first" in tiny.error_line(load_model, llama)


def test_unknown_model_type(llama: Path) -> None:
    tiny.edit_json(llama / "config.json", model_type="brandnew")
    message = tiny.error_line(load_model, llama)
    assert "model type 'brandnew' is unknown to transformers" in message
    assert message.endswith("upgrade transformers or choose another model")


def test_own_code_is_not_trusted(llama: Path) -> None:
    tiny.edit_json(
        llama / "config.json", model_type="brandnew", auto_map={"AutoConfig": "code.Config"}
    )
    (llama / "code.py").write_text("raise SystemExit('ran')")
    assert "brings its own code: if you trust it" in tiny.error_line(load_model, llama)


def test_no_causal_class(llama: Path) -> None:
    tiny.edit_json(llama / "config.json", model_type="vit", architectures=["ViTModel"])
    assert "vit has no causal language model" in tiny.error_line(load_model, llama)


def test_encoder(llama: Path) -> None:
    tiny.edit_json(llama / "config.json", model_type="bert", architectures=["BertForMaskedLM"])
    assert "is a bert encoder" in tiny.error_line(load_model, llama)


def test_invalid_config_value(llama: Path) -> None:
    tiny.edit_json(llama / "config.json", hidden_size="wide")
    assert "is not a valid llama config" in tiny.error_line(load_model, llama)


def test_corrupt_tokenizer(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{")
    message = tiny.error_line(load_model, llama)
    assert message.startswith(f"the tokenizer in {llama} cannot be read")


def test_chat_template_adds_bos_once(llama: Path) -> None:
    tokenizer = load_model(llama).tokenizer
    assert tokenizer is not None
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids.count(1) == 1
    assert tokenizer("hi").input_ids.count(1) == 1


def test_gpt2(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    loaded = load_model(tmp_path / "gpt2")
    assert loaded.model.lm_head.weight is loaded.model.transformer.wte.weight


def test_module_in_memory(tmp_path: Path) -> None:
    module = tiny.llama().train()
    loaded = from_module(module, tiny.tokenizer())
    assert loaded.model is module
    assert module.training  # the caller's module is left as it is
    assert loaded.path is None
    folder = loaded.model_path()
    assert folder == loaded.model_path()
    again = load_model(folder)
    assert torch.equal(again.model.lm_head.weight, module.lm_head.weight)
    assert again.tokenizer is not None
    del loaded
    assert not folder.exists()


def test_module_from_a_folder(llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = from_module(AutoModelForCausalLM.from_pretrained(llama))
    assert loaded.path == loaded.model_path() == llama
    shutil.rmtree(llama)
    gone = from_module(loaded.model)
    assert gone.path is None


def test_module_changed_since_it_was_loaded(llama: Path) -> None:
    """Trained, or with an adapter merged into it: its folder no longer holds its weights."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert from_module(module).model_path() == llama
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    loaded = from_module(module)
    assert loaded.model_path() == loaded.model_path() != llama
    again = load_model(loaded.model_path())
    assert torch.equal(again.model.lm_head.weight, module.lm_head.weight)
    assert torch.equal(
        again.model.model.layers[1].mlp.up_proj.weight, module.model.layers[1].mlp.up_proj.weight
    )


def test_module_without_a_head() -> None:
    from transformers import LlamaModel, T5Config, T5ForConditionalGeneration

    headless = LlamaModel(tiny.llama_config())
    assert "LlamaModel is no causal language model" in tiny.error_line(from_module, headless)
    t5 = T5Config(vocab_size=16, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
    both = T5ForConditionalGeneration(t5)
    assert "no causal language model" in tiny.error_line(from_module, both)
