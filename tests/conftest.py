"""What every test folder shares: which tests run by default, and the real model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SLOW_TIMEOUT_S = 3600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless --slow is given, -m names them or their node id is given."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if config.getoption("--slow") or re.search(r"\bslow\b", config.getoption("-m") or ""):
        return
    named = [argument for argument in config.args if "::" in argument]
    kept, left_out = [], []
    for item in items:
        wanted = item.get_closest_marker("slow") is None or any(
            argument.split("::", 1)[1] in item.nodeid for argument in named
        )
        (kept if wanted else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(scope="session")
def smol_path() -> Path:
    """The folder of SmolLM2-135M-Instruct; fetched and converted on first use."""
    from specdec.model import resolve_model

    return resolve_model("smollm2-135m-instruct")
