"""One tiny model and one server for all tests of the wire and of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specdec.rpc.client import Client
from specdec.testing import tiny_llama, tiny_tokenizer
from tests.rpc.running import RunningServer

NUM_PAGES = 400
MAX_POSITIONS = 3000


def make_llm(model: Any) -> Any:
    """The tiny model behind an engine; the same settings wherever answers are compared."""
    from specdec.llm import LLM

    return LLM(model, tiny_tokenizer(), num_pages=NUM_PAGES, max_num_seqs=8)


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    return tiny_llama(max_positions=MAX_POSITIONS)


@pytest.fixture(scope="session")
def llm(tiny_model: Any) -> Any:
    """The same model and settings as the server's, in this thread."""
    return make_llm(tiny_model)


@pytest.fixture(scope="session")
def running(tiny_model: Any) -> Iterator[RunningServer]:
    with RunningServer(lambda: make_llm(tiny_model).engine) as server:
        yield server


@pytest.fixture(scope="session")
def client(running: RunningServer) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client
