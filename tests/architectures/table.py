"""The tables of docs/models.md, made from the lists that the tests run.

`python -m tests.architectures.table` rewrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.architectures.cases import CASES, KINDS
from tests.architectures.refusals import REFUSALS

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


def served_table() -> str:
    """What is served: one row a case."""
    rows = [
        [case.shown, case.covers, ", ".join(f"`{kind}`" for kind in KINDS), case.remarks]
        for case in CASES
    ]
    return _table(["architecture", "what its test covers", "drafts", "remarks"], rows)


def refused_table() -> str:
    """What is refused: one row a kind of obstacle."""
    rows: dict[str, list[str]] = {}
    for case in REFUSALS:
        when = "config" if case.by_config else "run"
        rows.setdefault(case.kind, [case.kind, case.examples, when, f"... {case.says} ..."])
    return _table(["obstacle", "examples", "seen in", "the message says"], list(rows.values()))


TABLES = {"served": served_table, "refused": refused_table}


def render(document: str) -> str:
    """`document` with every table between its markers made anew."""
    for name, make in TABLES.items():
        start, end = f"<!-- table: {name} -->\n", f"<!-- end of table: {name} -->"
        before, rest = document.split(start)
        after = rest.split(end, 1)[1]
        document = f"{before}{start}{make()}{end}{after}"
    return document


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
