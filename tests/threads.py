"""How many threads a test's target runs on; a conftest imports the fixture to have it apply."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_for_tiny_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Targets this small run slower on two threads than on one; the real model does not."""
    threads = torch.get_num_threads()
    if request.node.get_closest_marker("smol") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
