"""The ahead-of-time gate: what it refuses, and that it compiles for GPUs that are not there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_kernels.checks.gate import format_table, main, select
from specdec_kernels.checks.table import Row, Table, Verdict, compare, updated

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"op/a": True, "op/b": False}
# fmt: off
ROWS: dict[str, dict[str, Row]] = {
    "op/a": {
        "sm_80": (90, 0, 2048, 8), "sm_90": (100, 0, 2048, 8), "sm_100": (100, 0, 2048, 8),
        "gfx942": (128, 16, 1024, 4),
    },
    "op/b": {
        "sm_80": (40, 0, 0, 0), "sm_90": (40, 0, 0, 0), "sm_100": (40, 0, 0, 0),
        "gfx942": (30, 0, 0, 0),
    },
}
# fmt: on
REASONS = {"op/a* gfx942": "the widest head"}


def table(triton: str = "3.6.0", **changed: Row) -> Table:
    """The rows above; `a_sm_90=row` replaces the one of op/a on sm_90."""
    rows = {name: dict(targets) for name, targets in ROWS.items()}
    for key, row in changed.items():
        name, _, target = key.partition("_")
        rows[f"op/{name}"][target] = row
    return Table(triton, rows, dict(REASONS))


def judge(measured: Table, committed: Table | None = None, **errors: str) -> Verdict:
    return compare(measured, committed or table(), NEEDS, errors)


def test_the_same_figures_pass() -> None:
    assert judge(table()) == Verdict([], [])


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"a_sm_90": (100, 0, 2048, 0)}, "op/a sm_90: has no matrix instruction"),
        ({"b_sm_90": (255, 8, 0, 0)}, "op/b sm_90: spills 8 bytes; avoid it, or write the reason"),
        ({"a_gfx942": (128, 20, 1024, 4)}, "op/a gfx942: spills 20 bytes, its reason was given"),
        ({"a_sm_90": (100, 0, 233_000, 8)}, "op/a sm_90: asks for 233000 bytes of shared memory"),
        ({"a_gfx942": (128, 16, 65_537, 4)}, "a program may have 65536"),
    ],
)
def test_a_worse_kernel_fails(changed: dict[str, Row], problem: str) -> None:
    failures = judge(table(**changed)).failures
    assert len(failures) == 1
    assert problem in failures[0]


def test_a_kernel_without_matrix_instructions_need_not_have_any() -> None:
    assert judge(table(b_sm_90=(41, 0, 0, 0))).failures == []


def test_what_does_not_compile_fails() -> None:
    measured = table()
    del measured.rows["op/a"]["sm_90"]
    verdict = compare(measured, table(), NEEDS, {"op/a sm_90": "CompilationError: tl.dot"})
    assert verdict.failures == ["op/a sm_90: does not compile: CompilationError: tl.dot"]


def test_a_configuration_may_not_vanish_unnoticed() -> None:
    committed = table()
    committed.rows["op/old"] = {"sm_90": (1, 0, 0, 0)}
    (failure,) = judge(table(), committed).failures
    assert failure.startswith("op/old: is in the table but no longer shipped; name it in CHANGELOG")
    assert "op/old" in updated(table(), committed, NEEDS, "nothing").rows
    assert "op/old" not in updated(table(), committed, NEEDS, "- Removed: op/old.").rows


def test_a_new_configuration_fails_until_the_table_has_it() -> None:
    committed = table()
    del committed.rows["op/b"]
    del committed.rows["op/a"]["sm_100"]
    partial = table()
    del partial.rows["op/a"]
    for measured in (table(), partial):
        failures = judge(measured, committed).failures
        assert failures == [
            "op/a: is not in the table for sm_100; run with --update and commit it",
            "op/b: is not in the table for sm_80, sm_90, sm_100, gfx942; run with --update and "
            "commit it",
        ]
    assert judge(table(), updated(table(), committed, NEEDS, "")).failures == []


def test_more_registers_are_reported_and_pass() -> None:
    verdict = judge(table(a_sm_90=(140, 0, 4096, 8)))
    assert verdict.failures == []
    assert verdict.remarks == [
        "op/a sm_90: 100 -> 140 registers",
        "op/a sm_90: 2048 -> 4096 bytes of shared memory",
    ]


def test_another_compiler_is_named_and_may_spill_more_of_what_is_explained() -> None:
    verdict = judge(table("9.0.0", a_gfx942=(120, 32, 1024, 4)))
    assert verdict.failures == []
    assert "Triton is 9.0.0, the table was made with 3.6.0" in verdict.remarks[0]
    assert len(verdict.remarks) == 3
    (failure,) = judge(table("9.0.0", b_sm_90=(40, 4, 0, 0))).failures
    assert "op/b sm_90: spills 4 bytes" in failure


def test_reasons_of_spills_that_are_gone_are_dropped() -> None:
    measured = table(a_gfx942=(128, 0, 1024, 4), b_sm_90=(40, 4, 0, 0))
    new = updated(measured, table(), NEEDS, "")
    assert new.spill_reasons == {}
    assert len(judge(measured, new).failures) == 1
    assert updated(table(), table(), NEEDS, "").spill_reasons == REASONS


def test_a_spill_needs_a_reason_of_its_own_target_and_one_that_says_something() -> None:
    for reasons in ({"op/a* sm_90": "the widest head"}, {"op/a* gfx942": ""}):
        committed = table()
        committed.spill_reasons = reasons
        (failure,) = judge(table(), committed).failures
        assert "op/a gfx942: spills 16 bytes; avoid it" in failure


def test_the_table_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table().save(path)
    assert Table.load(path) == table()
    assert Table.load(tmp_path / "none") == Table("", {})


def test_the_printed_table_has_every_row() -> None:
    lines = format_table(ROWS).splitlines()
    assert lines[0].split()[-4:] == ["sm_80", "sm_90", "sm_100", "gfx942"]
    assert lines[1].split() == ["op/a", "90/0/2/8", "100/0/2/8", "100/0/2/8", "128/16/1/4"]
    assert len(lines) == 3


def test_a_sample_is_the_same_every_time() -> None:
    jobs = [("m", f"op/{n}", target) for n in range(9) for target in ("sm_80", "gfx942")]
    assert select(jobs, "op/3", ["gfx942"], 0) == [("m", "op/3", "gfx942")]
    assert select(jobs, "", ["sm_80", "gfx942"], 4) == select(jobs, "", ["sm_80", "gfx942"], 4)
    assert len(select(jobs, "", ["sm_80"], 4)) == 4


def test_a_part_never_becomes_the_table() -> None:
    with pytest.raises(SystemExit):
        main(["--update", "--only", "write_kv"])
    with pytest.raises(SystemExit):
        main(["--targets", "sm_70"])


def test_the_committed_table_names_its_compiler_and_explains_its_spills() -> None:
    committed = Table.load()
    assert committed.triton
    assert committed.rows
    assert all(text for text in committed.spill_reasons.values())


def run_gate(*arguments: str, timeout: float) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "specdec_kernels.checks.gate", *arguments], cwd=ROOT,
        env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@needs_triton
def test_a_sample_of_the_kernels_compiles() -> None:
    assert "2 of " in run_gate("--sample", "2", "--processes", "1", timeout=280)


@needs_triton
@pytest.mark.slow
def test_every_kernel_compiles_for_every_target() -> None:
    assert " 0 failures" in run_gate(timeout=3000)
