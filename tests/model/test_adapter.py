"""LoRA adapters: merged exactly, on their own base only, and nothing but the weights changes.

Fault row P3 (vllm#4872, vllm#11966): LoRA beside drafting gave shape errors, or put the target's
adapter on the draft.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from typer.testing import CliRunner

from specdec import LLM, SamplingParams
from specdec.errors import InvalidRequestError
from specdec.model import load_model, resolve_model
from specdec.testing import (
    SelfDrafter,
    random_prompts,
    reference_generate,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen2,
    tiny_tokenizer,
)
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("cache")

IDS = torch.tensor([[5, 17, 300, 8, 44, 511, 2, 90]])


def adapted(model: Any, folder: Path, **changes: Any) -> Any:
    """A random adapter for a copy of `model`, saved in `folder`; returns PEFT's adapted model."""
    fields: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(
            copy.deepcopy(model), peft.LoraConfig(**(fields | changes))
        ).eval()
        wrapped.save_pretrained(folder)
    return wrapped


@pytest.fixture(scope="module")
def base_model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def masters(base_model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with the base in `base` and an adapter in `adapter`, and the adapted model."""
    folder = tmp_path_factory.mktemp("lora")
    base_model.save_pretrained(folder / "base")
    tiny_tokenizer(512).save_pretrained(folder / "base")
    wrapped = adapted(base_model, folder / "adapter")
    tiny.edit_json(folder / "adapter" / "adapter_config.json", base_model_name_or_path="../base")
    return folder, wrapped


@pytest.fixture
def lora(masters: tuple[Path, Any], tmp_path: Path) -> Path:
    """Those folders, for the test to damage."""
    return Path(shutil.copytree(masters[0], tmp_path / "lora"))


def checksums(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@torch.inference_mode()
def assert_close(got: Any, want: Any) -> None:
    ours, theirs = got(IDS).logits, want(IDS).logits
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize("draft", ["unadapted base", "base of another width"])
def test_p3_drafting_beside_an_adapter(
    draft: str, masters: tuple[Path, Any], base_model: Any, lora: Path
) -> None:
    """Ids equal plain decoding of the adapted model, and the draft stays unadapted."""
    before, weights = checksums(lora / "base"), copy.deepcopy(base_model.state_dict())
    narrow = tiny_llama(seed=1, hidden_size=48, num_heads=3, num_kv_heads=1)
    drafter = SelfDrafter(base_model if draft == "unadapted base" else narrow, 5)
    llm = LLM(lora / "base", adapter=lora / "adapter", draft=drafter)
    prompts = random_prompts(2, longest=20, seed=3)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    unadapted = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == reference_generate(masters[1], prompt, 64)
        unadapted += list(output.token_ids) == reference_generate(base_model, prompt, 64)
    assert unadapted == 0
    assert drafter.observations
    assert checksums(lora / "base") == before
    assert all(torch.equal(value, weights[key]) for key, value in base_model.state_dict().items())


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "rank-stabilised": (tiny_llama, {"use_rslora": True, "rank_pattern": {"q_proj": 2}}),
    "dora": (tiny_llama, {"use_dora": True}),
    "embedding-and-head": (tiny_llama, {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "whole-head": (tiny_llama, {"modules_to_save": ["lm_head"]}),
    "rank-above-width": (tiny_llama, {"r": 100, "target_modules": ["o_proj"]}),
    "biases": (tiny_qwen2, {"bias": "lora_only"}),
    "conv1d": (tiny_gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_equals_adapted(kind: str, tmp_path: Path) -> None:
    make, changes = KINDS[kind]
    model = make()
    model.save_pretrained(tmp_path / "base")
    wrapped = adapted(model, tmp_path / "adapter", **changes)
    with torch.no_grad():  # what is trained beside the LoRA weights is still the base's
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter += 0.05
    with warnings.catch_warnings(action="ignore"):
        wrapped.save_pretrained(tmp_path / "adapter")
    loaded = load_model(tmp_path / "base", adapter=tmp_path / "adapter")
    assert type(loaded.model) is type(model)
    assert loaded.model.state_dict().keys() == model.state_dict().keys()
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert_close(loaded.model, wrapped)


def test_bf16_is_merged_as_peft_does(lora: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(lora / "base", dtype=torch.bfloat16)
    wrapped = peft.PeftModel.from_pretrained(base, lora / "adapter")
    expected = wrapped.merge_and_unload().state_dict()
    loaded = load_model(lora / "base", dtype="bf16", adapter=lora / "adapter")
    for name, weight in loaded.model.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[name]), name


def test_no_second_copy_stays(lora: Path) -> None:
    def tensor_bytes() -> int:
        gc.collect()
        storages = {
            item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
            for item in gc.get_objects()
            if type(item) in (torch.Tensor, torch.nn.Parameter)
        }
        return sum(storages.values())

    before = tensor_bytes()
    plain = load_model(lora / "base")
    alone = tensor_bytes() - before
    del plain
    loaded = load_model(lora / "base", adapter=lora / "adapter")
    assert tensor_bytes() - before <= 1.05 * alone
    assert loaded.model_path() == loaded.model_path()
    assert tensor_bytes() - before <= 1.05 * alone


def test_model_is_the_adapter(masters: tuple[Path, Any], lora: Path) -> None:
    """An adapter's folder stands for its base with it; the base may lie beside it."""
    assert resolve_model(lora / "adapter") == lora / "adapter"
    loaded = load_model(lora / "adapter")
    assert_close(loaded.model, masters[1])
    assert loaded.source == f"{lora / 'base'} with the adapter {lora / 'adapter'}"
    assert loaded.tokenizer is not None
    config = lora / "adapter" / "adapter_config.json"
    tiny.edit_json(config, base_model_name_or_path=str(lora / "base"))
    assert_close(load_model(str(lora / "adapter")).model, masters[1])


def test_hub_adapter(masters: tuple[Path, Any], lora: Path) -> None:
    from huggingface_hub import constants

    repo = Path(constants.HF_HUB_CACHE) / "models--org--lora"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(lora / "adapter", snapshot)
    assert_close(load_model(lora / "base", adapter="org/lora").model, masters[1])
    tiny.edit_json(snapshot / "adapter_config.json", base_model_name_or_path=str(lora / "base"))
    assert_close(load_model("org/lora").model, masters[1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_model_path_has_the_merged_weights(dtype: str, lora: Path) -> None:
    """Also where the engine has packed the weights and given up those it was loaded with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    llm = LLM(lora / "base", adapter=lora / "adapter", dtype=dtype)
    expected = load_model(lora / "base", adapter=lora / "adapter", dtype=dtype).model.state_dict()
    folder = llm.model_path
    assert not (folder / "adapter_config.json").exists()
    assert "peft" not in (folder / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert llm.model_path == folder
    del llm
    gc.collect()
    assert not folder.exists()


def test_tokenizer_of_the_adapter(lora: Path) -> None:
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = "adapter's own"
    tokenizer.save_pretrained(lora / "adapter")
    loaded = load_model(lora / "base", adapter=lora / "adapter")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template == "adapter's own"


def refusal(lora: Path, base: str = "base") -> str:
    return tiny.error_line(load_model, lora / base, adapter=lora / "adapter")


def edit_config(lora: Path, **changes: object) -> None:
    tiny.edit_json(lora / "adapter" / "adapter_config.json", **changes)


def test_adapter_of_another_width(lora: Path) -> None:
    tiny_llama(hidden_size=48, num_heads=3, num_kv_heads=1).save_pretrained(lora / "narrow")
    message = refusal(lora, "narrow")
    assert message.startswith(f"{lora / 'adapter'} was made for another model: its base_model.")
    assert f"has the shape (4, 192), which model.layers.0.mlp.down_proj of {lora}" in message
    assert message.endswith("(4, 96) would fit); give the model it was made for (../base)")


def test_adapter_of_another_architecture(lora: Path) -> None:
    tiny_gpt2().save_pretrained(lora / "gpt2")
    message = refusal(lora, "gpt2")
    assert "it adapts model.layers.0.mlp.down_proj" in message
    assert f"which {lora / 'gpt2'} does not have" in message


def test_adapter_of_more_layers(lora: Path) -> None:
    tiny_llama(num_layers=1).save_pretrained(lora / "short")
    assert "it adapts model.layers.1." in refusal(lora, "short")


def test_config_and_weights_of_different_adapters(lora: Path) -> None:
    edit_config(lora, target_modules=["q_proj", "v_proj", "down_proj", "up_proj"])
    assert "names other layers than adapter_model.safetensors holds" in refusal(lora)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "is an adapter of type PREFIX_TUNING: only LORA"),
        ({"peft_type": "PROMPT_TUNING"}, "is an adapter of type PROMPT_TUNING"),
        ({"peft_type": "IA3"}, "is an adapter of type IA3"),
        ({"task_type": "SEQ_CLS"}, "is an adapter for SEQ_CLS, not for a causal language model"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is set"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is set"),
    ],
)
def test_kinds_that_are_not_merged(changes: dict[str, Any], part: str, lora: Path) -> None:
    edit_config(lora, **changes)
    assert part in refusal(lora)
    assert part in tiny.error_line(load_model, lora / "adapter")


def test_files_of_an_adapter(lora: Path) -> None:
    weights = lora / "adapter" / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    assert "is corrupt or cut short" in refusal(lora)
    weights.unlink()
    assert "has no adapter_model.safetensors" in refusal(lora)
    (lora / "adapter" / "adapter_model.bin").touch()
    assert "pickles are not loaded" in refusal(lora)
    (lora / "adapter" / "adapter_config.json").unlink()
    assert "is no adapter: it has no adapter_config.json" in refusal(lora)
    shutil.rmtree(lora / "adapter")
    assert "no such adapter" in refusal(lora)


def test_not_finite(lora: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = lora / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    weights[next(key for key in weights if "lora_B" in key)][0, 0] = float("nan")
    save_file(weights, file)
    message = refusal(lora)
    assert message.startswith(f"{lora / 'adapter'} gives model.layers.")
    assert message.endswith("weights that are not finite: the adapter is damaged")


def test_base_that_is_not_there(lora: Path) -> None:
    edit_config(lora, base_model_name_or_path="./nowhere/base")
    message = tiny.error_line(load_model, lora / "adapter")
    assert message.startswith(f"{lora / 'adapter'} is an adapter for ./nowhere/base: no such model")
    assert message.endswith(f"give the base as the model and {lora / 'adapter'} as its adapter "
                            "(--adapter)")  # fmt: skip
    edit_config(lora, base_model_name_or_path=None)
    assert "an adapter that does not name its base" in tiny.error_line(load_model, lora / "adapter")
    edit_config(lora, base_model_name_or_path="some/base", revision="v2")
    message = tiny.error_line(load_model, lora / "adapter")
    assert "is an adapter for revision v2 of some/base: download that revision, and give" in message
    assert load_model(lora / "base", adapter=lora / "adapter").model is not None
    edit_config(lora, base_model_name_or_path=str(lora / "adapter"), revision=None)
    assert "has no config.json" in tiny.error_line(load_model, lora / "adapter")


def test_two_adapters(lora: Path) -> None:
    assert "is an adapter itself" in refusal(lora, "adapter")


def test_model_and_adapter_in_one_folder(lora: Path) -> None:
    for file in (lora / "adapter").iterdir():
        shutil.copy(file, lora / "base" / file.name)
    assert "holds a model and an adapter for one" in tiny.error_line(load_model, lora / "base")


def test_quantised_base(lora: Path) -> None:
    quantisation = {"quant_method": "gptq", "bits": 4}
    tiny.edit_json(lora / "base" / "config.json", quantization_config=quantisation)
    message = refusal(lora)
    assert message.startswith(
        f"{lora / 'base'} is quantised, so {lora / 'adapter'} cannot be merged"
    )


def test_tied_head(tmp_path: Path) -> None:
    model = tiny_qwen2()
    model.save_pretrained(tmp_path / "base")
    adapted(model, tmp_path / "adapter", target_modules=["embed_tokens"])
    message = refusal(tmp_path)
    assert "adapts model.embed_tokens" in message
    assert "for embedding and head: merged it would" in message


def test_without_peft(lora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    message = refusal(lora)
    assert message.startswith(f"the adapter {lora / 'adapter'} needs peft (")
    assert message.endswith("pip install -U 'specdec-server[lora]'")
    assert load_model(lora / "base").model is not None


def test_loaded_module_with_an_adapter(base_model: Any, lora: Path) -> None:
    with pytest.raises(InvalidRequestError, match="merge the adapter yourself") as caught:
        LLM(base_model, adapter=lora / "adapter")
    assert caught.value.field == "adapter"


def test_module_with_adapters_beside_it(masters: tuple[Path, Any], lora: Path) -> None:
    message = tiny.error_line(LLM, masters[1])
    assert "this PeftModelForCausalLM has adapters beside its weights: merge them" in message
    merged = copy.deepcopy(masters[1]).merge_and_unload()
    output = LLM(merged).generate([[7, 8, 9]], SamplingParams(temperature=0, max_tokens=8))[0]
    assert list(output.token_ids) == reference_generate(masters[1], [7, 8, 9], 8)


def test_command_line(masters: tuple[Path, Any], lora: Path) -> None:
    from specdec.cli.main import app

    options = ["-p", "the", "--no-chat", "--json", "-n", "12", "--temperature", "0", "-q"]
    options.append("--ignore-eos")
    for arguments in (
        [str(lora / "base"), "--adapter", str(lora / "adapter")],
        [str(lora / "adapter")],
    ):
        result = CliRunner().invoke(app, ["generate", *arguments, *options])
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        prompt = tiny_tokenizer(512)("the").input_ids
        assert answer["token_ids"] == reference_generate(masters[1], prompt, 12)
