"""The script for GPUs, without one: its cases, its records, and that it survives what crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from specdec_kernels.checks import gpu, records, rivals, roofline, timing
from specdec_kernels.checks.cases import Case, Setting, SkippedError, all_cases, require
from specdec_kernels.checks.records import Record

ROOT = Path(__file__).resolve().parents[2]
PLAIN = Setting(torch.device("cpu"), tiny=True, impl="reference")


def run_script(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specdec_kernels.checks.gpu", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=timeout
    )


# FlashInfer computes on GPUs only; the plan's own options are the Triton form's.
CASES = [
    case for case in all_cases(tiny=True)
    if not case.name.endswith("flashinfer") and "plan:" not in case.name
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_passes_with_the_reference(case: Case) -> None:
    """The cases themselves are right: what they demand, plain torch fulfils."""
    case.run(PLAIN)


def test_names_are_unique_and_say_what_is_timed() -> None:
    for tiny in (True, False):
        names = [case.name for case in all_cases(tiny)]
        assert len(set(names)) == len(names)
    timed = [name for name in names if name.startswith("time/")]
    assert "time/32768x64x64/ours exact bf16" in timed
    assert "time/4096x8x16/flex_attention" in timed
    assert len({name.split("/")[1] for name in timed}) == 37


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "No GPU was found" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="triton is not installed")
def test_the_script_runs_in_the_interpreter(tmp_path: Path) -> None:
    done = run_script(
        "--interpret", "--only", "correct/write_kv int8", "--out", str(tmp_path), "--name", "x"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = records.read(tmp_path / "x.jsonl")
    assert [record.status for record in written] == ["passed"]
    page = (tmp_path / "x.md").read_text(encoding="utf-8")
    assert "- 1 cases: 1 passed, 0 failed, 0 skipped" in page
    assert "| correct/write_kv int8 cache | rows 5 |" in page


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="triton is not installed")
def test_every_case_passes_in_the_interpreter(tmp_path: Path) -> None:
    done = run_script(
        "--interpret", "--out", str(tmp_path), "--name", "x", "--seconds", "1500", timeout=1600
    )
    assert done.returncode == 0, done.stdout + done.stderr


CHILD = """
import json, os, sys, time
for name in json.load(sys.stdin):
    if name == "crash":
        print("last words", file=sys.stderr)
        os._exit(9)
    if name == "hang":
        time.sleep(60)
    status = "failed" if name == "lost" else "passed"
    line = json.dumps({"name": name, "status": status, "seconds": 0, "detail": "", "figures": {}})
    with open(sys.argv[1], "a") as file:
        file.write(line + "\\n")
    if name == "lost":
        sys.exit(3)
"""


def conduct(folder: Path, names: list[str], processes: int, seconds: float) -> dict[str, Record]:
    results = folder / "r.jsonl"
    with tqdm(total=len(names), disable=True) as bar:
        command = [sys.executable, "-c", CHILD, str(results)]
        gpu.Conductor(results, command, time.monotonic() + seconds, bar).run(names, processes)
    written = records.read(results)
    assert len(written) == len(names)
    return {record.name: record for record in written}


@pytest.mark.parametrize("processes", [1, 3])
def test_a_crash_is_recorded_and_the_rest_goes_on(tmp_path: Path, processes: int) -> None:
    found = conduct(tmp_path, ["a", "crash", "b", "lost", "c", "d"], processes, 100)
    assert found["crash"].status == "failed"
    assert "ended with 9: last words" in found["crash"].detail
    assert found["lost"].status == "failed"
    assert all(found[name].status == "passed" for name in "abcd")


def test_what_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CASE_SECONDS", 2)
    found = conduct(tmp_path, ["hang", "a"], 1, 100)
    assert found["hang"].detail == "no result in 2 s"
    assert found["a"].status == "passed"


def test_what_time_does_not_allow_is_skipped(tmp_path: Path) -> None:
    found = conduct(tmp_path, ["hang", "a"], 1, 1)
    assert [record.status for record in found.values()] == ["skipped", "skipped"]
    assert found["a"].detail == "out of time"


def raises(error: Exception) -> Case:
    def run(setting: Setting) -> dict[str, Any]:
        raise error

    return Case("group/case", run)


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (SkippedError("no such chip"), "skipped", "no such chip"),
        (torch.OutOfMemoryError("8 GiB"), "skipped", "out of memory: 8 GiB"),
        (RuntimeError("illegal"), "failed", "RuntimeError: illegal (test_gpu_check.py:"),
        (AssertionError("3 rows"), "failed", "AssertionError: 3 rows"),
    ],
)
def test_a_case_ends_in_a_record(
    error: Exception, status: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    record = gpu.run_case(raises(error), PLAIN)
    assert record.status == status
    assert record.detail.startswith(detail)


def test_a_half_written_line_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert records.read(path) == []
    record = Record("a", "passed", 0.1, "", {"us": 3.0})
    records.append(path, record)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record._asdict())[:20])
    assert records.read(path) == [record]


def test_the_page() -> None:
    page = records.markdown(
        {"device": "H200"},
        [
            Record("correct/a", "failed", 1.0, "worse | than\nallowed", {}),
            Record("bits/b", "passed", 1.0, "", {"rows": 5, "variants": ["x"]}),
            Record("time/512x1x1/ours", "passed", 1.0, "",
                   {"us": 12.34, "share": 0.5, "ratio": 2.0, "how": "graph"}),
            Record("time/512x1x1/other", "passed", 1.0, "", {"us": 20.0, "how": "graph"}),
            Record("time/512x1x1/none", "skipped", 1.0, "not installed", {}),
        ],
    )  # fmt: skip
    for line in (
        "- device: H200",
        "- 5 cases: 3 passed, 1 failed, 1 skipped",
        "| correct/a | worse / than allowed |",
        "| bits/b | rows 5 |",
        "| 512x1x1/ours | 12.3 | 50% | 2.00 | graph |",
        "| 512x1x1/other | 20.0 | - | - | graph |",
        "| time/512x1x1/none | not installed |",
    ):
        assert line in page.splitlines()


def report(folder: Path, record: Record) -> int:
    results = folder / f"{record.name}.jsonl"
    records.append(results, record)
    return gpu.report(gpu.parse(["--interpret"]), results, [record.name], 1.0)


def test_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = Record("a", "passed", 1.0, "", {"variants": [str(n) for n in range(40)]})
    assert report(tmp_path, good) == 0
    assert report(tmp_path, Record("b", "failed", 1.0, "3 rows differ", {})) == 1
    assert "FAILED b: 3 rows differ" in capsys.readouterr().out


def test_too_many_variants_fail(tmp_path: Path) -> None:
    many = {"variants": [str(n) for n in range(41)]}
    assert report(tmp_path, Record("a", "passed", 1.0, "", many)) == 1
    assert report(tmp_path, Record("flex_attention", "passed", 1.0, "", many)) == 0


def test_a_rival_that_computes_something_else_is_not_timed() -> None:
    def prepare(*inputs: torch.Tensor) -> rivals.Call:
        return lambda: torch.zeros_like(inputs[1])

    with pytest.raises(AssertionError, match="wrong computes something else"):
        timing.time_rival(PLAIN, point=(40, 2, 4), rival=rivals.Rival("wrong", prepare))
    with pytest.raises(AssertionError, match="no"):
        require(False, "no")


def test_devices_are_known_by_their_names() -> None:
    assert timing.known_device("NVIDIA H200") == roofline.H200
    assert timing.known_device("NVIDIA H100 80GB HBM3") == roofline.H100
    assert timing.known_device("NVIDIA A100-SXM4-80GB") == roofline.A100
    for other in ("NVIDIA L4", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB"):
        assert timing.known_device(other) is None


def test_the_roofline_is_the_larger_of_two_times() -> None:
    work = roofline.Work(4.8e12, 2 * 989e12)
    assert work.floor_s(roofline.H200) == pytest.approx(2.0)
    assert roofline.Work(4.8e12).floor_s(roofline.H200) == pytest.approx(1.0)
    shape = roofline.Shape(2, 100, 3, heads=4, kv_heads=2, head_dim=8)
    work = roofline.tree_attention(shape)
    assert work.bytes == 2 * 103 * 2 * 2 * 8 * 2 + 2 * 6 * 4 * 8 * 2 + 6 * 8
    assert work.flops == 4 * 6 * 4 * 8 * 101
    quantised = shape._replace(kv_bytes=1)
    assert quantised.token_bytes == 2 * 2 * (8 + 4)


def test_the_table_of_the_readme_is_what_the_module_prints() -> None:
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    assert roofline.markdown() in text
