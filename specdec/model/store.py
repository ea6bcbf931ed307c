"""The models on this machine: what is there, fetching one, removing one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import ModelError
from specdec.model.cache_folder import conversions_dir, exclusive, read_marker
from specdec.model.catalog import CATALOG, NamedModel
from specdec.model.download import hub_snapshot
from specdec.model.resolve import named_conversion, named_download, resolve_model


@dataclass(frozen=True)
class ModelRecord:
    """One model as `specdec models` shows it.

    Attributes:
        name: what `resolve_model` takes for it (a conversion: its folder's name, for removing).
        source: where its files came from, or would come from.
        present: whether it can be used without the network.
        path: its folder, or None if absent.
        size_bytes: what it takes on disk, downloads included; 0 if absent.
    """

    name: str
    source: str
    present: bool
    path: Path | None
    size_bytes: int


def list_models() -> list[ModelRecord]:
    """Catalog models, present or not, then converted GGUF files, then the hub's cache."""
    records = [_named_record(model) for model in CATALOG.values()]
    known = {record.path for record in records}
    found = [*_conversion_records(), *_hub_records()]
    return records + [record for record in found if record.path not in known]


def fetch_model(spec: str) -> ModelRecord:
    """Make `spec` usable without the network and say what it is.

    Raises:
        ModelError: see `resolve_model`.
    """
    path = resolve_model(spec)
    for record in list_models():
        if record.path == path:
            return record
    return ModelRecord(spec, "local folder", True, path, _size(path))


def remove_model(name: str) -> int:
    """Delete a model of the catalog, a conversion or a hub model from the caches.

    Args:
        name: as `list_models` gives it. Folders and files of the user are never touched.

    Returns:
        Bytes freed.

    Raises:
        ModelError: no such model in the caches, or it cannot be deleted.
    """
    named = CATALOG.get(name.lower())
    if named is not None:
        freed = _delete(named_conversion(named)) + _delete(named_download(named))
        freed += _delete_from_hub_cache(named.hub_id)
    elif name and Path(name).name == name and read_marker(conversions_dir() / name) is not None:
        freed = _delete(conversions_dir() / name)
    else:
        freed = _delete_from_hub_cache(name)
    if not freed:
        raise ModelError(
            f"{name} is not in the cache: `specdec models list` shows what is; folders of your own "
            "are yours to delete"
        )
    return freed


def _named_record(model: NamedModel) -> ModelRecord:
    converted, download = named_conversion(model), named_download(model)
    if read_marker(converted) is not None:
        size = _size(converted) + _size(download)
        return ModelRecord(model.name, f"wheel {model.wheel.requirement}", True, converted, size)
    snapshot = hub_snapshot(model.hub_id)
    if snapshot is not None:
        return ModelRecord(model.name, f"hub {model.hub_id}", True, snapshot, _size(snapshot))
    source = f"hub {model.hub_id} or wheel {model.wheel.requirement}"
    return ModelRecord(model.name, source, False, None, 0)


def _conversion_records() -> list[ModelRecord]:
    records = []
    for folder in sorted(conversions_dir().glob("*")):
        marker = read_marker(folder)
        if marker is not None:
            source = f"gguf {marker.get('source', 'unknown')}"
            records.append(ModelRecord(folder.name, source, True, folder, _size(folder)))
    return records


def _hub_records() -> list[ModelRecord]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    records = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        folder = hub_snapshot(repo.repo_id) if repo.repo_type == "model" else None
        if folder is not None:
            source = f"hub {repo.repo_id}"
            records.append(ModelRecord(repo.repo_id, source, True, folder, repo.size_on_disk))
    return records


def _delete(path: Path) -> int:
    """Delete a file or folder of our cache; bytes freed, 0 if it was not there."""
    if not path.exists():
        return 0
    size = _size(path)
    with exclusive(path.name):
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise ModelError(
                f"cannot delete {path} ({error.strerror or error}): check its permissions"
            ) from error
    return size


def _delete_from_hub_cache(hub_id: str) -> int:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return 0
    revisions = [
        revision.commit_hash
        for repo in cache.repos
        if repo.repo_type == "model" and repo.repo_id == hub_id
        for revision in repo.revisions
    ]
    if not revisions:
        return 0
    strategy = cache.delete_revisions(*revisions)
    strategy.execute()
    return strategy.expected_freed_size


def _size(path: Path) -> int:
    """Bytes on disk; links into the hub's blobs are followed."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
