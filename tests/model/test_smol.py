"""The default model itself: what came out of the wheel is SmolLM2, whole and ready to chat."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.model import (
    LoadedModel,
    eos_token_ids,
    load_model,
    max_model_len,
    resolve_model,
    sampling_defaults,
)
from specdec.model.cache_folder import read_marker
from specdec.model.catalog import CATALOG, DEFAULT_MODEL
from specdec.model.resolve import named_download

pytestmark = pytest.mark.smol


@pytest.fixture(scope="module")
def smol(smol_path: Path) -> LoadedModel:
    return load_model(smol_path)


def test_second_resolve_is_quick(smol_path: Path) -> None:
    start = time.perf_counter()
    assert resolve_model(DEFAULT_MODEL) == smol_path
    assert time.perf_counter() - start < 2.0


def test_dtype_and_ties(smol: LoadedModel) -> None:
    assert smol.model.dtype == torch.bfloat16
    assert smol.model.lm_head.weight is smol.model.model.embed_tokens.weight
    assert sum(weight.numel() for weight in smol.model.parameters()) == 134_515_008
    assert max_model_len(smol.model.config) == 8192


def test_special_tokens(smol: LoadedModel) -> None:
    tokenizer = smol.tokenizer
    assert tokenizer is not None
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert eos_token_ids(smol.generation_config, smol.model.config, tokenizer) == {2}
    assert sampling_defaults(smol.generation_config) == {}


def test_chat_template_adds_bos_once(smol: LoadedModel) -> None:
    assert smol.tokenizer is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = smol.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    # <|im_start|> is both BOS and the opening of every turn: one each, and none before the first.
    assert ids.count(1) == 3
    assert smol.tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert smol.tokenizer("Hi").input_ids == smol.tokenizer.convert_tokens_to_ids(["Hi"])


def test_text_is_split_as_in_training(smol: LoadedModel) -> None:
    tokenizer = smol.tokenizer
    assert tokenizer is not None
    assert tokenizer.tokenize("a\n\n1. b  23") == ["a", "ĊĊ", "1", ".", "Ġb", "ĠĠ", "2", "3"]
    text = "été 漢字 🙂\tx\r\n  <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_answers_sensibly(smol: LoadedModel) -> None:
    assert smol.tokenizer is not None
    inputs = smol.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    logits = smol.model(**inputs).logits
    assert torch.isfinite(logits).all()
    output = smol.model.generate(**inputs, max_new_tokens=16, do_sample=False)
    text = smol.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in text
    assert text.endswith("<|im_end|>")


@pytest.mark.slow  # reading and unpacking the whole file takes half a minute
def test_weights_equal_the_gguf(smol: LoadedModel, smol_path: Path) -> None:
    import gguf

    source = named_download(CATALOG[DEFAULT_MODEL])
    if read_marker(smol_path) is None or not source.is_file():
        pytest.skip("the model came from the hub: there is no GGUF file to compare with")
    weights = smol.model.state_dict()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    by_gguf_name = {
        f"{names.get_name(name.removesuffix('.weight'))}.weight": weight
        for name, weight in weights.items()
        if name != "lm_head.weight"
    }
    reader = gguf.GGUFReader(source)
    assert {tensor.name for tensor in reader.tensors} == by_gguf_name.keys()
    for tensor in reader.tensors:
        unpacked = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        want = torch.from_numpy(unpacked.copy())
        heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2])
        if heads is not None:
            want = want.view(heads, -1, 2, want.shape[1]).transpose(1, 2).reshape(want.shape)
        assert torch.equal(by_gguf_name[tensor.name], want.to(torch.bfloat16)), tensor.name
