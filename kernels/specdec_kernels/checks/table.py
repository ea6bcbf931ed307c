"""The committed table of what the kernels take, and how a new measurement is judged by it.

Imports no Triton. A row is [registers, spills, shared, matrix instructions]; see
`specdec_kernels.checks.measure.Measured`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

COMMITTED = Path(__file__).with_name("compiled.json")

KIB = 1024
SHARED_LIMITS = {"sm_80": 163 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
"""Bytes of shared memory that one program may ask for."""

Row = tuple[int, int, int, int]


@dataclass
class Table:
    """Rows by configuration and target, the compiler that made them, and why some spill.

    spill_reasons: by pattern of "configuration target", as `fnmatch` reads it.
    """

    triton: str
    rows: dict[str, dict[str, Row]]
    spill_reasons: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = COMMITTED) -> Table:
        """Reads a table; a missing file is an empty table."""
        if not path.exists():
            return cls("", {})
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = {
            name: {target: (row[0], row[1], row[2], row[3]) for target, row in targets.items()}
            for name, targets in data["configurations"].items()
        }
        return cls(data["triton"], rows, data["spill_reasons"])

    def save(self, path: Path = COMMITTED) -> None:
        """Writes the table, one configuration a line, so that a diff shows what changed."""
        lines = [f"  {json.dumps(k)}: {json.dumps(self.rows[k])}" for k in sorted(self.rows)]
        reasons = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in self.spill_reasons.items()]
        text = (
            f'{{\n"triton": {json.dumps(self.triton)},\n'
            + '"row": ["registers", "spills", "shared", "matrix instructions"],\n'
            + '"spill_reasons": {\n' + ",\n".join(sorted(reasons)) + "\n},\n"
            + '"configurations": {\n' + ",\n".join(lines) + "\n}\n}\n"
        )  # fmt: skip
        path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Verdict:
    """What is wrong, and what is only worth a look."""

    failures: list[str]
    remarks: list[str]


def compare(
    measured: Table,
    committed: Table,
    needs_matrix: dict[str, bool],
    errors: dict[str, str],
) -> Verdict:
    """Judges a measurement of all shipped configurations by the committed table.

    needs_matrix: every shipped configuration. errors: what the compiler said, by
    "configuration target", where there is no row.
    """
    failures = [f"{key}: does not compile: {text}" for key, text in errors.items()]
    remarks: list[str] = []
    same_compiler = measured.triton == committed.triton
    if not same_compiler and committed.triton:
        remarks.append(
            f"Triton is {measured.triton}, the table was made with {committed.triton}: other "
            "figures than the table's are only reported"
        )
    for name in sorted(committed.rows.keys() - needs_matrix.keys()):
        failures.append(
            f"{name}: is in the table but no longer shipped; name it in CHANGELOG.md as removed, "
            "then run with --update"
        )
    for name in sorted(needs_matrix):
        known = committed.rows.get(name, {})
        new = [target for target in SHARED_LIMITS if target not in known]
        if new:
            failures.append(
                f"{name}: is not in the table for {', '.join(new)}; run with --update and commit it"
            )
        for target, row in measured.rows.get(name, {}).items():
            before = known.get(target)
            explained = any(
                bool(reason) and fnmatchcase(f"{name} {target}", pattern)
                for pattern, reason in committed.spill_reasons.items()
            )
            problems, notes = _judge(
                target, row, before, needs_matrix[name], explained, same_compiler
            )
            failures += [f"{name} {target}: {text}" for text in problems]
            remarks += [f"{name} {target}: {text}" for text in notes]
    return Verdict(failures, remarks)


def _judge(
    target: str,
    row: Row,
    before: Row | None,
    needs_matrix: bool,
    explained: bool,
    same_compiler: bool,
) -> tuple[list[str], list[str]]:
    registers, spills, shared, matrix = row
    problems: list[str] = []
    notes: list[str] = []
    if needs_matrix and not matrix:
        problems.append("has no matrix instruction")
    if shared > SHARED_LIMITS[target]:
        problems.append(
            f"asks for {shared} bytes of shared memory, a program may have {SHARED_LIMITS[target]}"
        )
    if spills and not explained:
        problems.append(
            f"spills {spills} bytes; avoid it, or write the reason into spill_reasons of the table"
        )
    if before is None:
        return problems, notes
    if explained and spills > before[1]:
        (problems if same_compiler else notes).append(
            f"spills {spills} bytes, its reason was given for {before[1]}; weigh it again and run "
            "with --update"
        )
    if registers != before[0]:
        notes.append(f"{before[0]} -> {registers} registers")
    if shared != before[2]:
        notes.append(f"{before[2]} -> {shared} bytes of shared memory")
    return problems, notes


def updated(
    measured: Table, committed: Table, needs_matrix: dict[str, bool], changelog: str
) -> Table:
    """The table to commit after a run over everything.

    A configuration that is no longer shipped leaves the table only if `changelog` names it.
    Reasons of spills that are gone go too; a new spill gets none, so that it fails until someone
    has written one.
    """
    rows = dict(measured.rows)
    for name in committed.rows.keys() - needs_matrix.keys():
        if name not in changelog:
            rows[name] = committed.rows[name]
    spilling = [f"{n} {t}" for n, targets in rows.items() for t, row in targets.items() if row[1]]
    reasons = {
        pattern: text
        for pattern, text in committed.spill_reasons.items()
        if any(fnmatchcase(name, pattern) for name in spilling)
    }
    return Table(measured.triton, rows, reasons)
