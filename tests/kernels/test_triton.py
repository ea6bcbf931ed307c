"""The Triton forms: run in the interpreter, and compiled for GPUs that need not be there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_kernels import TreeBatch, plan_tree_attention

HERE = Path(__file__).resolve().parent
SHARED_MEMORY = {"80": 163 * 1024, "90": 227 * 1024, "100": 227 * 1024, "gfx942": 64 * 1024}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run(command: list[str], *, interpret: bool, cache: Path, timeout: float = 280) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True,
        cwd=HERE.parents[1], timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_cases(cache: Path, *options: str, timeout: float = 280) -> None:
    """Runs `interpreted_triton.py`; a failure shows the failing cases."""
    cases = str(HERE / "interpreted_triton.py")
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=short", *options, cases]
    output = run(command, interpret=True, cache=cache, timeout=timeout)
    assert " passed" in output
    assert "skipped" not in output


def test_cases_in_the_interpreter(tmp_path: Path) -> None:
    run_cases(tmp_path)


@pytest.mark.slow
def test_slow_cases_in_the_interpreter(tmp_path: Path) -> None:
    run_cases(tmp_path, "-m", "slow", timeout=1800)


def check_compiled(backend: str, arch: str, warp_size: int, num_shapes: int, cache: Path) -> None:
    """Shared memory must fit the GPU: a kernel that asks for more cannot be launched.

    num_shapes: of the attention kernel; 0 for all.
    """
    program = str(HERE / "compiled_triton.py")
    arguments = [backend, arch, str(warp_size), str(num_shapes)]
    output = run([program, *arguments], interpret=False, cache=cache, timeout=900)
    kernels = [json.loads(line) for line in output.splitlines()]
    names = [name for name, *_ in kernels]
    assert names == ["tree_attention_kernel"] * (len(names) - 1) + ["write_kv_kernel"]
    assert len(names) == num_shapes + 1 or (num_shapes == 0 and len(names) > 9)
    for _, _, shared, size in kernels:
        assert shared <= SHARED_MEMORY[arch]
        assert size > 0


def test_kernels_compile_ahead_of_time(tmp_path: Path) -> None:
    check_compiled("cuda", "90", 32, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "arch", "warp_size"),
    [("cuda", "80", 32), ("cuda", "90", 32), ("cuda", "100", 32), ("hip", "gfx942", 64)],
)
def test_every_shape_compiles_ahead_of_time(
    backend: str, arch: str, warp_size: int, tmp_path: Path
) -> None:
    check_compiled(backend, arch, warp_size, 0, tmp_path)


def test_the_triton_form_needs_a_gpu_or_the_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process is the interpreter's")
    batch = TreeBatch.from_lists([1], [0], [[0]], 4)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before Python starts"):
        plan_tree_attention(batch, impl="triton")
