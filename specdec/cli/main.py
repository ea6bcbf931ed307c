"""The command `specdec`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specdec import __version__
from specdec.cli.demo import demo
from specdec.cli.generate import generate
from specdec.cli.models import models
from specdec.cli.serve import serve
from specdec.errors import SpecdecError


class _ErrorGroup(TyperGroup):
    """Turns errors that specdec raises on purpose into one line on stderr and status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(130) from interrupt


app = typer.Typer(
    name="specdec",
    cls=_ErrorGroup,
    help="Exact speculative decoding: same text, fewer passes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(generate)
app.add_typer(models, name="models")
app.command()(demo)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"specdec {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version)
    ] = False,
) -> None:
    """Exact speculative decoding: same text, fewer passes."""
