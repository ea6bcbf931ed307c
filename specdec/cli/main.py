"""The command `specdec`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specdec import __version__
from specdec.cli import completion
from specdec.cli.chat import chat
from specdec.cli.demo import demo
from specdec.cli.doctor import doctor
from specdec.cli.generate import generate
from specdec.cli.models import models
from specdec.cli.serve import serve
from specdec.errors import InvalidRequestError, SpecdecError


class _Commands(TyperGroup):
    """Turns errors that specdec raises on purpose into one line on stderr and status 1."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Typer guesses the shell; an argument after the option names it.
        if len(args) == 2 and args[0] in (completion.SHOW, completion.INSTALL):
            completion.show_or_install(*args)
            raise typer.Exit
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            message = str(error)
            if isinstance(error, InvalidRequestError):
                message = f"{self._option(ctx, error.field)}: {error.message}"
            typer.echo(f"error: {' '.join(message.split())}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(130) from interrupt

    def _option(self, ctx: Any, field: str) -> str:
        """The option of the running command that sets a field, as the user writes it."""
        command = self.get_command(ctx, ctx.invoked_subcommand)
        name = field.rpartition(".")[2]
        for parameter in command.params if command is not None else ():
            if parameter.name == name and parameter.opts[0].startswith("--"):
                return str(parameter.opts[0])
        return field


app = typer.Typer(
    name="specdec",
    cls=_Commands,
    help="Exact speculative decoding: same text, fewer passes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(generate)
app.command()(chat)
app.add_typer(models, name="models")
app.command()(doctor)
app.command()(demo)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"specdec {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", help="Print the version.", callback=_print_version),
    ] = False,
) -> None:
    """Exact speculative decoding: same text, fewer passes."""
