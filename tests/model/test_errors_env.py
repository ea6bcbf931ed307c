"""The error classes, the environment, and an import that stays light."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.env import cache_dir, hub_offline
from specdec.errors import InvalidRequestError, ModelError, SpecdecError


def test_model_error_is_one_line() -> None:
    assert str(ModelError("first\n  second\tthird")) == "first second third"
    assert issubclass(ModelError, SpecdecError)


def test_invalid_request_names_its_field() -> None:
    error = InvalidRequestError("top_p", "must be in (0, 1], is 2")
    assert (error.field, str(error)) == ("top_p", "top_p: must be in (0, 1], is 2")
    assert isinstance(error, (SpecdecError, ValueError))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.field, str(copy)) == (error.field, str(error))


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SPECDEC_CACHE", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "specdec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "specdec"
    monkeypatch.setenv("SPECDEC_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("Yes", True), ("0", False)])
def test_hub_offline(monkeypatch: pytest.MonkeyPatch, value: str, offline: bool) -> None:
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert hub_offline() is offline


def test_import_is_light() -> None:
    heavy = ["torch", "transformers", "huggingface_hub", "rich"]
    code = f"import sys, specdec.model; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
