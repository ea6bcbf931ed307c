from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specdec.testing import tiny_tokenizer
from tests.rpc.fixtures import client, llm, running, tiny_model

__all__ = ["client", "llm", "running", "tiny_model"]

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C works here and in child processes, also where a shell started the tests without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_folder(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model as a folder that transformers can load."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run() -> Run:
    """Run the command in this process: run("generate", ..., input=None)."""
    from specdec.cli.main import app

    def call(*arguments: str, **keywords: Any) -> Result:
        return CliRunner().invoke(app, list(arguments), **keywords)

    return call
