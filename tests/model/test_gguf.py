"""GGUF files: converted once, weight for weight, with the tokenizer that the model learned with."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch

from specdec.model import gguf as conversion
from specdec.model.cache_folder import MARKER, conversions_dir, read_marker
from specdec.model.gguf import convert_gguf
from specdec.model.gguf_header import read_gguf_header
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("cache")


def test_weights_survive_bit_for_bit(gguf_file: Path, llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = convert_gguf(gguf_file)
    want = AutoModelForCausalLM.from_pretrained(llama, dtype="auto")
    got = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    expected = want.state_dict()
    assert got.state_dict().keys() == expected.keys()
    for name, weight in got.state_dict().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[name]), name
    assert got.lm_head.weight is got.model.embed_tokens.weight
    ids = torch.arange(3, 20)[None]
    assert torch.equal(got(ids).logits, want(ids).logits)


def test_folder_is_an_ordinary_checkpoint(gguf_file: Path) -> None:
    folder = convert_gguf(gguf_file)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 128
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert generation["pad_token_id"] == 2
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}


def test_every_end_token_is_kept(gguf_file: Path, llama: Path) -> None:
    tiny.write_gguf(gguf_file, llama, tokenizer__ggml__eot_token_id=0)
    generation = json.loads((convert_gguf(gguf_file) / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]


def test_tokenizer_splits_digits_as_the_vocabulary_did(gguf_file: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(gguf_file))
    text = "hi\n\n1 and  22 <|im_end|>"
    ids = tokenizer(text).input_ids
    # Without single digits the blank line before a number falls apart into two tokens.
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["hi", "ĊĊ", "1", "Ġ"]
    assert "ĠĠ" in tokenizer.convert_ids_to_tokens(ids)
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.chat_template == tiny.TEMPLATE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.model_max_length == 128


@pytest.mark.parametrize("add_bos", [False, True])
def test_bos_before_text_as_the_file_says(gguf_file: Path, llama: Path, add_bos: bool) -> None:
    from transformers import AutoTokenizer

    tiny.write_gguf(gguf_file, llama, add_bos=add_bos)
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(gguf_file))
    assert tokenizer("hi").input_ids.count(1) == int(add_bos)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, return_dict=False).count(1) == 1


def test_second_call_converts_nothing(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert_gguf(gguf_file)
    monkeypatch.setattr(conversion, "_convert", lambda *args: pytest.fail("converted again"))
    assert convert_gguf(gguf_file) == folder


def test_changed_file_is_converted_anew(gguf_file: Path) -> None:
    first = convert_gguf(gguf_file)
    os.utime(gguf_file, ns=(1, 1))
    assert convert_gguf(gguf_file) != first


def test_files_beside_it_are_not_read(gguf_file: Path) -> None:
    alone = convert_gguf(gguf_file)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        (gguf_file.parent / name).write_text('{"model_type": "gpt2", "bos_token": "hi"}')
    os.utime(gguf_file, ns=(1, 1))
    beside = convert_gguf(gguf_file)
    assert beside != alone
    for file in alone.iterdir():
        if file.name != MARKER:
            assert (beside / file.name).read_bytes() == file.read_bytes(), file.name


def test_unfinished_folder_is_not_used(gguf_file: Path) -> None:
    folder = convert_gguf(gguf_file)
    (folder / MARKER).unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    leftover = folder.parent / f".{folder.name}.tmp-killed"
    leftover.mkdir()
    assert convert_gguf(gguf_file) == folder
    assert read_marker(folder) is not None
    assert (folder / "model.safetensors").stat().st_size > 1000
    assert not leftover.exists()


def test_failed_conversion_leaves_nothing(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "load_weights", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert_gguf(gguf_file)
    assert list(conversions_dir().iterdir()) == []


def test_full_disk_is_said(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "_save_model", no_space)
    message = tiny.error_line(convert_gguf, gguf_file)
    assert "No space left on device" in message
    assert "SPECDEC_CACHE" in message


def test_cut_short(gguf_file: Path) -> None:
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[:-100])
    assert "cut short: its header promises" in tiny.error_line(convert_gguf, gguf_file)
    gguf_file.write_bytes(data[:500])
    assert "ends inside its header" in tiny.error_line(convert_gguf, gguf_file)


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"<html>", "is not a GGUF file (it starts with b'<htm')"),
        (b"GGUF" + struct.pack("<I", 1), "is GGUF version 1"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "a string of"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 77), "value type 77"),
    ],
)
def test_not_a_gguf(tmp_path: Path, start: bytes, part: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(start + bytes(64))
    assert part in tiny.error_line(convert_gguf, path)


def test_absent_file(tmp_path: Path) -> None:
    assert "No such file" in tiny.error_line(convert_gguf, tmp_path / "none.gguf")
    assert "No such file" in tiny.error_line(read_gguf_header, tmp_path / "none.gguf")


def test_split_file(gguf_file: Path, llama: Path) -> None:
    tiny.write_gguf(gguf_file, llama, split__count=2)
    assert "llama-gguf-split --merge" in tiny.error_line(convert_gguf, gguf_file)


def test_unknown_architecture(gguf_file: Path) -> None:
    data = gguf_file.read_bytes().replace(b"llama", b"lxama")
    gguf_file.write_bytes(data)
    message = tiny.error_line(convert_gguf, gguf_file)
    assert "GGUF architecture 'lxama'" in message
    assert message.endswith("use the model's safetensors checkpoint instead")


def test_missing_weight(gguf_file: Path) -> None:
    data = gguf_file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight")
    gguf_file.write_bytes(data)
    assert "model.layers.1.mlp.up_proj.weight" in tiny.error_line(convert_gguf, gguf_file)


def test_too_little_memory(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.model.memory.available_memory", lambda: 1000)
    message = tiny.error_line(convert_gguf, gguf_file)
    assert message.startswith("converting tiny.gguf needs 0.1 MiB of memory and 0.0 MiB are free")
    assert list(conversions_dir().glob("*")) == []


def test_header(gguf_file: Path, llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    header = read_gguf_header(gguf_file)
    model = AutoModelForCausalLM.from_pretrained(llama)
    assert header.architecture == "llama"
    assert header.num_elements == sum(weight.numel() for weight in model.parameters())
    assert header.metadata["tokenizer.ggml.tokens"] == tiny.vocabulary()
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
