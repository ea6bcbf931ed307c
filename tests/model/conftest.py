"""Tiny models on disk: transformers folders, GGUF files, wheels and a hub cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.model import tiny


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own and an empty, unreachable hub."""
    from huggingface_hub import constants

    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


@pytest.fixture(scope="session")
def llama_master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny.save_llama(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def llama(llama_master: Path, tmp_path: Path) -> Path:
    """A two-layer Llama in bf16 with tokenizer, in one file; the test may damage it."""
    return Path(shutil.copytree(llama_master, tmp_path / "llama"))


@pytest.fixture(scope="session")
def sharded_master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    tiny.save_llama(folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def sharded(sharded_master: Path, tmp_path: Path) -> Path:
    """The same Llama in several files with an index, without a tokenizer."""
    return Path(shutil.copytree(sharded_master, tmp_path / "sharded"))


@pytest.fixture(scope="session")
def gguf_master(tmp_path_factory: pytest.TempPathFactory, llama_master: Path) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny.write_gguf(path, llama_master)
    return path


@pytest.fixture
def gguf_file(gguf_master: Path, tmp_path: Path) -> Path:
    """The same Llama as a GGUF file with fp32 weights."""
    return Path(shutil.copy(gguf_master, tmp_path / "tiny.gguf"))


@pytest.fixture
def hub_llama(cache: Path, llama: Path) -> str:
    """A hub id whose model lies whole in the hub's cache."""
    from huggingface_hub import constants

    repo = Path(constants.HF_HUB_CACHE) / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(llama, repo / "blobs")
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for blob in (repo / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(blob)
    return "org/tiny"
