"""Folders of the cache: written beside their place, renamed into it, one writer at a time."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.env import cache_dir
from specdec.errors import ModelError
from specdec.model.progress import say

MARKER = "specdec_model.json"


def downloads_dir() -> Path:
    """Where files from wheels are kept."""
    return cache_dir() / "downloads"


def conversions_dir() -> Path:
    """Where GGUF files converted to safetensors are kept, one folder each."""
    return cache_dir() / "converted"


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the cache's lock called `name`; a second process waits until the first is done.

    Raises:
        ModelError: the cache folder cannot be written.
    """
    from filelock import FileLock, Timeout

    folder = cache_dir() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{name}.lock")
        try:
            lock.acquire(timeout=0.1)
        except Timeout:
            say(f"Waiting for another process that prepares {name} ...")
            lock.acquire()
    except OSError as error:
        raise cannot_write(error) from error
    try:
        yield
    finally:
        lock.release()


def cannot_write(error: Exception) -> ModelError:
    """What to tell the user when the cache cannot be written: full, read-only, no permission."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ModelError(
        f"cannot write the cache folder {cache_dir()} ({reason}): free space there, or set "
        "SPECDEC_CACHE to a folder that can be written"
    )


@contextmanager
def new_folder(final: Path, marker: dict[str, Any]) -> Iterator[Path]:
    """Yield an empty folder that becomes `final` if the block succeeds.

    The marker file is written last and the rename is atomic, so a folder with a marker is whole.
    Call it under `exclusive`: it sweeps what an interrupted writer of the same folder left.

    Raises:
        ModelError: the cache cannot be written.
    """
    try:
        with _work_folder(final) as work:
            yield work
            for file in work.iterdir():
                file.chmod(0o644)
            (work / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
            work.chmod(0o755)
            if final.exists():
                shutil.rmtree(final)
            os.replace(work, final)
    except OSError as error:
        raise cannot_write(error) from error


@contextmanager
def _work_folder(final: Path) -> Iterator[Path]:
    final.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{final.name}.tmp-"
    for stale in final.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a finished folder, or None if the folder is missing or unfinished."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None
