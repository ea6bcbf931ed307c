"""The Triton forms in the interpreter: every `interpreted_*.py` in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_kernels import TreeBatch, plan_tree_attention

HERE = Path(__file__).resolve().parent
FILES = sorted(HERE.glob("interpreted_*.py"))
NO_TESTS_COLLECTED = 5

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_cases(file: Path, *options: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=short"]
    return subprocess.run(
        [*command, *options, str(file)], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, cwd=HERE.parents[1], timeout=timeout,
    )  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_cases_in_the_interpreter(file: Path) -> None:
    done = run_cases(file, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_slow_cases_in_the_interpreter(file: Path) -> None:
    """A file need not have slow cases."""
    done = run_cases(file, "-m", "slow", timeout=3000)
    assert done.returncode in (0, NO_TESTS_COLLECTED), done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_the_triton_form_needs_a_gpu_or_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process is the interpreter's")
    batch = TreeBatch.from_lists([1], [0], [[0]], 4)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before Python starts"):
        plan_tree_attention(batch, impl="triton")
