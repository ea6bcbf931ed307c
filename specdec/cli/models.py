"""`specdec models`: what is on this machine."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from specdec.cli import completion

models = typer.Typer(help="List, fetch and remove models.", no_args_is_help=True)


@models.command("list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the named models and what the caches hold."""
    from specdec.model.store import list_models

    records = list_models()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(r) for r in records], default=str, indent=2))
        return
    rows = [("MODEL", "HERE", "SIZE", "FROM", "PATH")]
    for record in records:
        here, size = ("yes", megabytes(record.size_bytes)) if record.present else ("no", "-")
        rows.append((record.name, here, size, record.source, str(record.path or "-")))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


@models.command()
def fetch(
    model: Annotated[
        str,
        typer.Argument(
            help="A named model, a hub id or a .gguf file.", autocompletion=completion.model_names
        ),
    ],
) -> None:
    """Download and convert a model, so that later starts need no network."""
    from specdec.model.store import fetch_model

    record = fetch_model(model)
    typer.echo(f"{record.name}: {megabytes(record.size_bytes)} in {record.path}")


@models.command()
def remove(
    model: Annotated[
        str,
        typer.Argument(
            help="As `specdec models list` names it.", autocompletion=completion.removable_names
        ),
    ],
) -> None:
    """Delete a model from the caches."""
    from specdec.model.store import remove_model

    typer.echo(f"{model}: {megabytes(remove_model(model))} freed")


def megabytes(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 1e6:,.1f} MB"
