"""What holds for every command: fast help, exit codes, errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.cli.conftest import Run

COMMANDS = [
    [],
    ["serve"],
    ["generate"],
    ["chat"],
    ["doctor"],
    ["models"],
    ["models", "list"],
    ["models", "fetch"],
    ["models", "remove"],
    ["demo"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(run: Run, command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    """Every --help in one fresh process: what makes a start slow must not be loaded by any."""
    code = (
        "import contextlib, io, json, sys\n"
        "from specdec.cli.main import app\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        app([*command, '--help'], prog_name='specdec', standalone_mode=False)\n"
        "    assert 'Usage: ' in out.getvalue(), command\n"
        "heavy = {'torch', 'transformers', 'grpc', 'google.protobuf', 'numpy', 'tokenizers',\n"
        "         'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(COMMANDS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_command_is_asked_for_help() -> None:
    from typer.main import get_command

    from specdec.cli.main import app

    commands: Any = get_command(app)
    assert {command[0] for command in COMMANDS if command} == set(commands.commands)
    models = {command[1] for command in COMMANDS if len(command) > 1}
    assert models == set(commands.commands["models"].commands)


def test_version(run: Run) -> None:
    from specdec import __version__

    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"specdec {__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["generate", "--no-such-option"],
        ["generate", "some-model"],
        ["generate", "some-model", "prompt", "-p", "prompt"],
        ["generate", "some-model", "prompt", "--server", "127.0.0.1:1"],
        ["generate", "-p", "x", "--server", "127.0.0.1:1", "--draft", "none"],
        ["generate", "-p", "x", "--server", "127.0.0.1:1", "--dtype", "fp32"],
        ["generate", "-p", "x", "--speculation", "sometimes"],
        ["serve", "some-model", "--port", "70000"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "./no/such/model", "-p", "hi"], "no/such/model"),
        (["serve", "./no/such/model", "--port", "0"], "no/such/model"),
        (["generate", "-p", "hi", "--server", "127.0.0.1:1"], "127.0.0.1:1"),
        (["generate", "-p", "hi", "--temperature", "-1"], "--temperature"),
        (["generate", "-p", "hi", "--max-nodes", "1000"], "--max-nodes"),
        (["models", "remove", "no-such-model"], "no-such-model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_are_one_line_and_status_1(run: Run, arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert words in lines[0]


def test_interrupt_is_status_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.model import store

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "list_models", interrupted)
    assert run("models", "list").exit_code == 130
