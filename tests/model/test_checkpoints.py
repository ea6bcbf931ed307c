"""Folders as they are found: shards, ties, several ends, no template, own code, pickles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.errors import InvalidRequestError
from specdec.model import load_model, resolve_model
from specdec.model.folder import INDEX
from specdec.output import RequestOutput
from specdec.request import FinishReason
from specdec.testing import random_prompts, reference_generate, tiny_llama, tiny_tokenizer
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("cache")

PROMPT = random_prompts(1, longest=10, seed=5)[0]


def generate(folder: Path, **fields: Any) -> RequestOutput:
    params = SamplingParams(**({"temperature": 0, "max_tokens": 24} | fields))
    return LLM(folder).generate([PROMPT], params)[0]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def plain(model: Any) -> list[int]:
    return reference_generate(model, PROMPT, 24)


def test_shards(model: Any, plain: list[int], tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert list(generate(tmp_path).token_ids) == plain


def test_index_names_a_tensor_that_is_nowhere(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = tmp_path / INDEX
    weights = json.loads(index.read_text())["weight_map"] | {"model.extra.weight": shards[0].name}
    tiny.edit_json(index, weight_map=weights)
    message = tiny.error_line(load_model, tmp_path)
    assert f"{shards[0].name} does not hold model.extra.weight" in message


def test_tensor_that_the_index_forgets(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    weights = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    wanted = next(name for name in weights if name.endswith("1.self_attn.q_proj.weight"))
    shard = tmp_path / weights[wanted]
    names = [name for name, file in weights.items() if file == shard.name]
    kept = {name: file for name, file in weights.items() if name not in names}
    tiny.edit_json(tmp_path / INDEX, weight_map=kept)
    assert f"lacks {len(names)} of the weights" in tiny.error_line(load_model, tmp_path)


@pytest.mark.parametrize("stored", ["absent", "equal", "another"])
def test_tied_head(stored: str, tmp_path: Path) -> None:
    """As transformers loads it: also where a file holds a head that its config says is tied."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    if stored != "absent":
        head = weights["model.embed_tokens.weight"].clone()
        head += 0.5 * torch.randn_like(head) if stored == "another" else 0.0
        save_file(weights | {"lm_head.weight": head}, file, {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert list(generate(tmp_path).token_ids) == reference_generate(reference, PROMPT, 24)


@pytest.mark.parametrize("where", ["generation config", "config", "both"])
def test_several_ends(where: str, model: Any, plain: list[int], tmp_path: Path) -> None:
    """As in `generate`: the generation config's ids if it names any, else the config's."""
    model.save_pretrained(tmp_path)
    late, early = plain[9], plain[4]
    first = min(plain.index(late), plain.index(early))
    ends = {
        "generation config": ([late, early], None),
        "config": (None, [late, early]),
        "both": ([late], [early]),
    }[where]
    tiny.edit_json(tmp_path / "config.json", eos_token_id=ends[1])
    tiny.edit_json(tmp_path / "generation_config.json", eos_token_id=ends[0])
    output = generate(tmp_path)
    stop = plain.index(late) if where == "both" else first
    assert list(output.token_ids) == plain[: stop + 1]
    assert output.finish_reason is FinishReason.STOP


def test_without_a_chat_template(model: Any, plain: list[int], tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(tmp_path)
    with pytest.raises(InvalidRequestError, match="no chat template; send text") as caught:
        llm.generate([{"role": "user", "content": "hi"}])
    assert caught.value.field == "prompt"
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    output = llm.generate("the", params)[0]
    assert list(output.token_ids) == reference_generate(model, tokenizer("the").input_ids, 5)


OWN_CONFIG = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "specdec-test-own"
"""
OWN_MODEL = """
from pathlib import Path

from transformers import LlamaForCausalLM

from .own_config import OwnConfig

Path(__file__).with_name("ran").touch()


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose architecture is in the folder, and the folder its code is copied to."""
    from transformers import dynamic_module_utils

    modules = str(tmp_path / "modules")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    folder = tmp_path / "own"
    model.save_pretrained(folder)
    (folder / "own_config.py").write_text(OWN_CONFIG)
    (folder / "own_model.py").write_text(OWN_MODEL)
    code = {
        "AutoConfig": "own_config.OwnConfig",
        "AutoModelForCausalLM": "own_model.OwnForCausalLM",
    }
    tiny.edit_json(folder / "config.json", model_type="specdec-test-own", auto_map=code)
    return folder


def test_code_of_its_own_is_refused(own_code: Path, tmp_path: Path) -> None:
    message = tiny.error_line(LLM, own_code)
    assert message.startswith(f"{own_code} (specdec-test-own) brings its own code: if you trust it")
    assert "--trust-remote-code" in message
    assert not list(tmp_path.rglob("ran"))


def test_code_of_its_own_that_is_trusted(own_code: Path, plain: list[int], tmp_path: Path) -> None:
    llm = LLM(own_code, trust_remote_code=True)
    output = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=24))[0]
    assert list(output.token_ids) == plain
    assert list(tmp_path.rglob("ran"))


def test_tokenizer_with_code_of_its_own(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tiny_tokenizer(512).save_pretrained(tmp_path)
    tiny.edit_json(
        tmp_path / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": ["own_tokenizer.OwnTokenizer", None]},
    )
    (tmp_path / "own_tokenizer.py").write_text("raise SystemExit('ran')")
    message = tiny.error_line(load_model, tmp_path)
    assert f"the tokenizer in {tmp_path} brings its own code" in message
    assert "--trust-remote-code" in message


def test_pickles_beside_safetensors_are_left_alone(
    model: Any, plain: list[int], tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert list(generate(tmp_path).token_ids) == plain


def test_pickles_alone(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    message = tiny.error_line(load_model, tmp_path / "model")
    assert "has its weights as pytorch_model.bin only, and pickles are not loaded" in message
    assert message.endswith("save it with save_pretrained to get safetensors")
    # What the message says to do helps.
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "again")
    assert resolve_model(tmp_path / "again")
    shutil.rmtree(tmp_path / "model")
