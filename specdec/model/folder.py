"""Is this folder a model that can be loaded? Answered without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import ModelError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LFS_START = b"version https://git-lfs"


def check_folder(folder: Path) -> None:
    """Check that `folder` holds a readable config and whole safetensors.

    Headers are read, weights are not, so this takes milliseconds.

    Raises:
        ModelError: names the file that is missing, corrupt or of an unsupported kind, and the fix.
    """
    config = folder / CONFIG
    if not config.is_file():
        raise _no_config(folder)
    if (folder / "adapter_config.json").is_file():
        # transformers would load both, and not say so.
        raise ModelError(
            f"{folder} holds a model and an adapter for one: move the adapter's files to a folder "
            "of their own, and give that with --adapter if it is wanted"
        )
    check_config(read_json(config), folder)
    if (folder / GENERATION_CONFIG).is_file():
        read_json(folder / GENERATION_CONFIG)
    for file in weight_files(folder):
        tensor_names(file)


def check_config(config: Mapping[str, Any], name: object) -> None:
    """Refuse what is no decoder-only language model by its config alone.

    Raises:
        ModelError: no `model_type`, or an encoder-decoder.
    """
    if not config.get("model_type") and not config.get("auto_map"):
        raise ModelError(
            f"{name}: {CONFIG} has no model_type: it is not a transformers model; give a folder "
            "saved with save_pretrained"
        )
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{name} is an encoder-decoder ({config.get('model_type')}): only decoder-only "
            "language models are served"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`, all of them there.

    Raises:
        ModelError: no weights, weights of another kind only, or a shard missing.
    """
    index = folder / INDEX
    if not index.is_file():
        single = folder / WEIGHTS
        if single.is_file():
            return [single]
        raise _no_weights(folder)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map: the file is corrupt, download it again")
    names = sorted({str(name) for name in weight_map.values()})
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelError(
            f"{folder} lacks {len(absent)} of {len(names)} weight files, {absent[0]} first "
            f"(named in {INDEX}): download them into the folder"
        )
    files = [folder / name for name in names]
    held = set().union(*(tensor_names(file) for file in files))
    lost = sorted(set(weight_map) - held)
    if lost:
        raise ModelError(
            f"{folder}: {weight_map[lost[0]]} does not hold {lost[0]}, which {INDEX} says it does: "
            "the files are of different checkpoints, download them again"
        )
    return files


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        ModelError: unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(
            f"{file} is not valid JSON ({error}): the file is corrupt, download it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object: the file is corrupt, download it again")
    return value


def tensor_names(file: Path) -> set[str]:
    """The names in the header of a safetensors file, which is checked against the file's size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            return set(tensors.keys())
    except (SafetensorError, OSError) as error:
        if _starts_with(file, _LFS_START):
            raise ModelError(
                f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in {file.parent}"
            ) from error
        raise ModelError(f"{file} is corrupt or cut short ({error}): download it again") from error


def _starts_with(file: Path, start: bytes) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(len(start)) == start
    except OSError:
        return False


def _no_config(folder: Path) -> ModelError:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return ModelError(f"{folder} has no {CONFIG} but a GGUF file: give its path, {ggufs[0]}")
    return ModelError(
        f"{folder} has no {CONFIG}: give a folder saved with save_pretrained, a .gguf file or a "
        "hub id"
    )


def _no_weights(folder: Path) -> ModelError:
    others = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if others:
        return ModelError(
            f"{folder} has its weights as {others[0].name} only, and pickles are not loaded: load "
            "it with transformers and save it with save_pretrained to get safetensors"
        )
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return ModelError(
            f"{folder} has {shards[0].name} but neither {WEIGHTS} nor {INDEX}: download the index "
            "file into the folder"
        )
    return ModelError(
        f"{folder} has no weights ({WEIGHTS} or {INDEX}): download them into the folder"
    )
