"""Entries for the fault tests; every step of every engine in them is checked for lost pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from transformers import PreTrainedModel

from specdec.engine import Engine
from specdec.testing import page_check, tiny_llama
from tests.faults.entries import Starter
from tests.threads import one_thread_for_tiny_models  # noqa: F401


@pytest.fixture(autouse=True)
def _checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free + used = total after every step, and every decoding request has one token without KV."""
    step = Engine.step

    def checked(engine: Engine) -> Any:
        deltas = step(engine)
        page_check(engine)
        said = {(delta.request_id, delta.index) for delta in deltas}
        for request in engine._scheduler.running:
            if ((request.leader or request).request_id, request.index) in said:
                assert request.num_computed == len(request.token_ids) - 1
        return deltas

    monkeypatch.setattr(Engine, "step", checked)


@pytest.fixture(params=["LLM", "Generate"])
def start(request: pytest.FixtureRequest) -> Iterator[Starter]:
    with ExitStack() as stack:
        yield Starter(request.param, stack)


@pytest.fixture(scope="session")
def tiny() -> PreTrainedModel:
    return tiny_llama()
