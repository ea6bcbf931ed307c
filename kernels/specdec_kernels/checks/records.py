"""What the GPU check writes: one line of JSON a case, and a Markdown page of them all."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

Status = Literal["passed", "failed", "skipped"]


class Record(NamedTuple):
    """The outcome of one case.

    seconds: of the whole case. detail: why it failed or was skipped. figures: what it measured.
    """

    name: str
    status: Status
    seconds: float
    detail: str
    figures: dict[str, Any]


def append(path: Path, record: Record) -> None:
    """Adds one line in one write, so that processes may share the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record._asdict()) + "\n")


def read(path: Path) -> list[Record]:
    """All records written so far; a line that is being written is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [Record(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]


def markdown(facts: dict[str, Any], records: Iterable[Record]) -> str:
    """The page: facts of the run, what failed, checks, times point by point, what was skipped."""
    records = list(records)
    count = {status: sum(r.status == status for r in records) for status in _STATUSES}
    lines = ["# Check of the kernels", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines += [f"- {len(records)} cases: " + ", ".join(f"{n} {s}" for s, n in count.items()), ""]
    failed = [r for r in records if r.status == "failed"]
    if failed:
        lines += ["## Failed", "", "| case | why |", "|---|---|"]
        lines += [f"| {r.name} | {_cell(r.detail)} |" for r in failed] + [""]
    checks = [r for r in records if not r.name.startswith("time/") and r.status == "passed"]
    if checks:
        lines += ["## Checks that passed", "", "| case | figures |", "|---|---|"]
        lines += [f"| {r.name} | {_figures(r.figures)} |" for r in checks] + [""]
    lines += _times([r for r in records if r.name.startswith("time/") and r.status == "passed"])
    skipped = [r for r in records if r.status == "skipped"]
    if skipped:
        lines += ["## Skipped", "", "| case | why |", "|---|---|"]
        lines += [f"| {r.name} | {_cell(r.detail)} |" for r in skipped] + [""]
    return "\n".join(lines)


_STATUSES: tuple[Status, ...] = ("passed", "failed", "skipped")


def _times(records: list[Record]) -> list[str]:
    if not records:
        return []
    lines = [
        "## Times", "",
        "Contexts x requests x nodes. Share: bytes that must move over the time, as a part of the "
        "memory bandwidth. Ratio: time over the roofline floor.", "",
        "| case | us | share of bandwidth | ratio to floor | how |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for record in records:
        figures = record.figures
        cells = [f"{figures['us']:.1f}"]
        for key, form in (("share", "{:.0%}"), ("ratio", "{:.2f}")):
            value = figures.get(key)
            cells.append("-" if value is None else form.format(value))
        cells.append(str(figures.get("how", "")))
        lines.append(f"| {record.name.removeprefix('time/')} | {' | '.join(cells)} |")
    return [*lines, ""]


def _figures(figures: dict[str, Any]) -> str:
    shown = {k: f"{v:.2e}" if isinstance(v, float) else v for k, v in figures.items()}
    return _cell(", ".join(f"{k} {v}" for k, v in shown.items() if k != "variants"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]
