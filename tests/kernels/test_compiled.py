"""The C++ forms: built once, kept, rebuilt when anything changes, done without where need be."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdec_kernels import compiled, plan_tree_attention, tree_attention, write_kv
from specdec_kernels.testing import random_step
from specdec_kernels.tree_attention import cpu as attention_cpu
from specdec_kernels.tree_attention import native
from specdec_kernels.write_kv import cpu as write_cpu

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache folder, and no form looked up before or after."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    lookups = (
        compiled.load_library, native._function, attention_cpu.compile_problem, write_cpu._function,
    )  # fmt: skip
    for lookup in lookups:
        lookup.cache_clear()
    yield
    for lookup in lookups:
        lookup.cache_clear()


def build(tmp_path: Path, answer: int, text: str = SOURCE) -> ctypes.CDLL:
    source = tmp_path / "answer.cpp"
    source.write_text(text)
    return compiled.load_library((source,), (f"ANSWER={answer}",))


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "compiled").iterdir())


@needs_compiler
def test_a_library_is_built_once_and_again_when_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(tmp_path, 42).answer() == 42
    (first,) = libraries(tmp_path)
    compiled.load_library.cache_clear()
    monkeypatch.setattr(compiled, "_compile", lambda *args: pytest.fail("compiled twice"))
    assert build(tmp_path, 42).answer() == 42
    monkeypatch.undo()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    assert build(tmp_path, 43).answer() == 43
    compiled.load_library.cache_clear()
    assert build(tmp_path, 42, SOURCE.replace("ANSWER", "ANSWER + 1")).answer() == 43
    compiled.load_library.cache_clear()
    monkeypatch.setattr(compiled, "_cpu", lambda: "another CPU that shares the home folder")
    assert build(tmp_path, 42).answer() == 42
    assert len(libraries(tmp_path)) == 4
    assert first in libraries(tmp_path)


@needs_compiler
def test_what_stands_in_the_way_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(compiled.CompileError, match=r"answer\.cpp.* failed:(.|\n)*error"):
        build(tmp_path, 1, "this is no C++")
    assert not libraries(tmp_path), "half a library must not stay"
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(blocked))
    with pytest.raises(compiled.CompileError, match="cannot be made or loaded"):
        build(tmp_path, 1)
    monkeypatch.setenv("SPECDEC_COMPILE", "0")
    with pytest.raises(compiled.CompileError, match="SPECDEC_COMPILE=0 forbids it"):
        build(tmp_path, 1)


def test_without_a_compiler_everything_runs_in_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    step = random_step([[-1, 0, 0], 1], [20, 3], head_dim=16, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for layout in ("fast", "exact"):
            plan = plan_tree_attention(step.batch, layout=layout)  # type: ignore[arg-type]
            out = tree_attention(step.query, step.key_cache, step.value_cache, plan, scale=0.25)
            assert bool(torch.isfinite(out).all())
    (record,) = caplog.records
    assert "no C++ compiler: set CXX, or install one of c++, g++, clang++" in record.message
    assert attention_cpu.best_cache_dtype(torch.float32) == torch.float32
    caches = torch.zeros(2, 3, 4, 2, 16)
    rows = torch.randn(2, 2, 16)
    write_kv(rows, rows, caches[0], caches[1], torch.tensor([3, 7]))
    assert torch.equal(caches[0].flatten(0, 1)[[3, 7]], rows)


@needs_compiler
def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    (tmp_path / "answer.cpp").write_text(SOURCE)
    program = (
        "from pathlib import Path; from specdec_kernels.compiled import load_library; "
        f"print(load_library((Path({str(tmp_path / 'answer.cpp')!r}),), ('ANSWER=7',)).answer())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=200)[0].split() for process in running] == [[b"7"]] * 2
    assert len(libraries(tmp_path)) == 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif("avx2" not in compiled._cpu().split(), reason="needs AVX2")
def test_the_width_of_the_registers_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for flag in ("-march=native", "-march=haswell"):
        monkeypatch.setattr(compiled, "_machine_flag", lambda flag=flag: flag)
        for lookup in (compiled.load_library, native._function):
            lookup.cache_clear()
        for head_dim in (64, 72, 256):
            step = random_step([[-1, 0, 0, 2], 70], [600, 30], head_dim=head_dim, seed=head_dim)
            plan = plan_tree_attention(step.batch)
            results.append(
                tree_attention(
                    step.query, step.key_cache, step.value_cache, plan, scale=0.1, softcap=4.0
                )
            )
    for wide, narrow in zip(results[:3], results[3:], strict=True):
        assert torch.equal(wide, narrow)
