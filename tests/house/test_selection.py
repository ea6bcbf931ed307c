"""Which tests run when nothing, or something, is asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = """
import pytest

def test_fast(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.slow
@pytest.mark.smol
def test_slow_smol(): pass
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"test_fast"}),
        (["--slow"], {"test_fast", "test_slow", "test_slow_smol"}),
        (["-m", "slow and not smol"], {"test_slow"}),
        (["-m", "smol"], set()),
        (["test_sample.py::test_slow_smol"], {"test_slow_smol"}),
    ],
    ids=["default", "option", "marker", "other-marker", "node-id"],
)
def test_slow_tests_run_when_asked_for(
    tmp_path: Path, arguments: list[str], expected: set[str]
) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_sample.py").write_text(SAMPLE, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    smol\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert {line.split("::")[1] for line in lines if "::" in line} == expected
