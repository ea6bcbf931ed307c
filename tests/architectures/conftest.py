"""One engine a case, kept while the tests of that case run."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

from tests.architectures.building import Served, make_model
from tests.architectures.cases import CASES, Case
from tests.threads import one_thread_for_tiny_models  # noqa: F401


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def served(request: pytest.FixtureRequest) -> Served:
    case: Case = request.param
    if Version(transformers.__version__) < Version(case.since):
        pytest.skip(f"transformers {transformers.__version__} is older than {case.since}")
    return Served(case, make_model(case))
