"""`specdec doctor`: whether everything works here, and how to get what is missing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.examine import Check, State, examine

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {State.NOTE: "yellow", State.MISSING: "yellow", State.BROKEN: "bold red"}
_PIPE_WIDTH = 200


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object.")
    ] = False,
) -> None:
    """Check that everything works here, and say how to get what is missing.

    Exits with status 1 if anything that is needed is broken.
    """
    from rich.console import Console

    with Console(stderr=True).status("looking around"):
        checks = list(examine())
    broken = [check.name for check in checks if check.state is State.BROKEN]
    if as_json:
        records = [dataclasses.asdict(check) for check in checks]
        typer.echo(json.dumps({"works": not broken, "checks": records}, indent=2))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        console.print(table_of(checks))
        console.print(conclusion(broken))
    if broken:
        raise typer.Exit(1)


def table_of(checks: Sequence[Check]) -> Table:
    """One row a check, under the name of its group; what to do comes on a line of its own."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    group = ""
    for check in checks:
        if check.group != group:
            if group:
                table.add_row()
            group = check.group
            table.add_row(Text(group, style="bold"))
        state = Text(check.state.value, style=_STYLES.get(check.state, ""))
        table.add_row(Text(f"  {check.name}"), state, Text(check.found))
        if check.fix:
            table.add_row("", "", Text(f"-> {check.fix}"))
    return table


def conclusion(broken: Sequence[str]) -> str:
    """The last line."""
    if not broken:
        return "\nEverything needed works."
    return f"\nBroken: {', '.join(broken)}."
