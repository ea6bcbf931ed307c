"""Progress bars on stderr for whatever takes longer than two seconds; silent without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float], None]


@contextmanager
def progress_bar(title: str, total: float, *, unit: str = "steps") -> Iterator[Advance]:
    """Show a bar and yield the function that moves it on.

    Args:
        title: what is being done, in a few words.
        total: the sum of all advances, in bytes or in steps.
        unit: `"bytes"` adds size and speed, `"steps"` counts.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich import progress
    from rich.console import Console

    sizes: list[progress.ProgressColumn] = (
        [progress.DownloadColumn(), progress.TransferSpeedColumn()]
        if unit == "bytes"
        else [progress.MofNCompleteColumn()]
    )
    columns = [
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *sizes,
        progress.TimeElapsedColumn(),
    ]
    with progress.Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' own bars and advice while ours are shown; restores both settings."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def say(message: str) -> None:
    """One line on stderr for a person at a terminal; nothing when stderr is not one."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)
