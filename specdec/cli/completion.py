"""What the shell completes, and the scripts that make it ask."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import typer

SHOW = "--show-completion"
INSTALL = "--install-completion"
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def model_names(incomplete: str) -> list[str]:
    """Names that MODEL takes and that begin so: named models, then what the hub's cache holds."""
    from huggingface_hub import constants

    from specdec.model.catalog import CATALOG

    cache = Path(constants.HF_HUB_CACHE)
    cached = (folder.name.removeprefix("models--") for folder in cache.glob("models--*"))
    names = [*CATALOG, *sorted(name.replace("--", "/", 1) for name in cached)]
    return [name for name in names if name.startswith(incomplete)]


def removable_names(incomplete: str) -> list[str]:
    """Names of models that are on this machine and begin so."""
    from specdec.model.store import list_models

    names = [record.name for record in list_models() if record.present]
    return [name for name in names if name.startswith(incomplete)]


def draft_names(incomplete: str) -> list[tuple[str, str]]:
    """Drafters whose names begin so, each with its description."""
    from specdec_drafts import available_drafters

    drafts = available_drafters().items()
    return [(name, text) for name, text in drafts if name.startswith(incomplete)]


def dtype_names(incomplete: str) -> list[str]:
    """Values of --dtype that begin so."""
    return [name for name in ("auto", "bf16", "fp16", "fp32") if name.startswith(incomplete)]


def show_or_install(flag: str, shell: str) -> None:
    """Do what --show-completion or --install-completion say, for a named shell.

    Raises typer.BadParameter for a shell that typer has no script for.
    """
    # Not declared public; the tests of both options notice when it changes.
    scripts: Any = importlib.import_module("typer.completion")
    if shell not in _SHELLS:
        raise typer.BadParameter(f"{flag} knows {', '.join(_SHELLS)}, not {shell!r}")
    if flag == SHOW:
        script = scripts.get_completion_script(
            prog_name="specdec", complete_var="_SPECDEC_COMPLETE", shell=shell
        )
        typer.echo(script)
        return
    _, path = scripts.install(shell=shell, prog_name="specdec")
    typer.echo(f"{shell} completion installed in {path}; it works in new terminals")
