"""`specdec chat`: a conversation in the terminal, or one turn a line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli import options
from specdec.cli.conversation import NO_TEMPLATE, Conversation, InterruptedAnswer
from specdec.cli.groups import spread
from specdec.cli.source import LocalSource, opened
from specdec.errors import ModelError
from specdec.model.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console


@spread
def chat(
    model: options.OptionalModel = None,
    server: options.Server = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    quiet: options.Quiet = False,
    *,
    sampling: options.Sampling,
    grammar: options.GrammarOptions,
    speculation: options.SpeculationOptions,
    engine: options.Engine,
) -> None:
    """Hold a conversation, with a model in this process or a server.

    Ctrl-C ends a running answer, Ctrl-D leaves, /help lists the commands.

    If stdin is no terminal, each line is one turn, and only answers go to stdout.
    """
    from rich.console import Console

    params = sampling.params(grammar)
    requested = speculation.speculation()
    with opened(model, server, engine) as source:
        if isinstance(source, LocalSource) and not source.has_chat_template:
            raise ModelError(NO_TEMPLATE)
        notes = Console(stderr=True, highlight=False)
        conversation = Conversation(
            source,
            params,
            requested,
            system=system,
            show_stats=not quiet,
            say=lambda line: notes.print(line, style="dim", markup=False, soft_wrap=True),
        )
        if sys.stdin.isatty():
            _in_terminal(conversation, notes, server or model or DEFAULT_MODEL)
        else:
            _from_pipe(conversation)


def _in_terminal(conversation: Conversation, notes: Console, name: str) -> None:
    notes.print(f"{name}: /help lists the commands, Ctrl-D leaves", style="dim", soft_wrap=True)
    for line in _typed_lines():
        with contextlib.suppress(InterruptedAnswer):
            conversation.read(line)
        if conversation.is_over:
            return


def _from_pipe(conversation: Conversation) -> None:
    for line in sys.stdin:
        try:
            conversation.read(line.rstrip("\n"))
        except InterruptedAnswer:
            raise typer.Exit(130) from None
        if conversation.is_over:
            break
    if conversation.num_failed:
        raise typer.Exit(1)


def _typed_lines() -> Iterator[str]:
    """Lines typed at the prompt, until Ctrl-D; Ctrl-C drops the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and recalls them)
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input('. ')}"
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
        else:
            yield line
