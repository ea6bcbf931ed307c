"""`specdec models` is a thin layer over specdec.model.store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.model import store
from specdec.model.store import ModelRecord
from tests.cli.conftest import Run

RECORDS = [
    ModelRecord("here", "hub a/b", True, Path("/models/here"), 2_500_000),
    ModelRecord("far", "hub c/d", False, None, 0),
]


@pytest.fixture(autouse=True)
def fake_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "list_models", lambda: RECORDS)
    monkeypatch.setattr(store, "fetch_model", lambda name: RECORDS[0])
    monkeypatch.setattr(store, "remove_model", lambda name: 1_500_000)


def test_list(run: Run) -> None:
    lines = run("models", "list").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["MODEL", "HERE", "SIZE", "FROM", "PATH"],
        ["here", "yes", "2.5", "MB", "hub", "a/b", "/models/here"],
        ["far", "no", "-", "hub", "c/d", "-"],
    ]


def test_list_as_json(run: Run) -> None:
    rows = json.loads(run("models", "list", "--json").stdout)
    assert [row["name"] for row in rows] == ["here", "far"]
    assert rows[0]["path"] == "/models/here"
    assert rows[1]["present"] is False


def test_fetch(run: Run) -> None:
    assert run("models", "fetch", "here").stdout == "here: 2.5 MB in /models/here\n"


def test_remove(run: Run) -> None:
    assert run("models", "remove", "here").stdout == "here: 1.5 MB freed\n"
