"""What the shell completes, asked the way the shell asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specdec.cli import completion
from specdec.cli.main import app
from tests.cli.conftest import Run


def completions(*words: str) -> list[str]:
    """What bash would offer after these words, the last of which is not finished."""
    asked = {
        "_SPECDEC_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["specdec", *words]),
        "COMP_CWORD": str(len(words)),
    }
    result = CliRunner().invoke(app, [], prog_name="specdec", env=asked)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout.split()


def test_commands() -> None:
    assert completions("gen") == ["generate"]


def test_options() -> None:
    assert completions("serve", "--dra") == ["--draft"]


def test_values_of_options() -> None:
    assert completions("chat", "--speculation", "f") == ["fixed"]
    assert completions("generate", "--draft", "ng") == ["ngram"]
    assert completions("generate", "--dtype", "f") == ["fp16", "fp32"]


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models--org--smol-model").mkdir()
    (tmp_path / "datasets--org--smol-data").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for command in (["serve"], ["generate"], ["chat"], ["demo"], ["models", "fetch"]):
        assert completions(*command, "smo") == ["smollm2-135m-instruct"]
    assert completions("serve", "org/") == ["org/smol-model"]


def test_models_to_remove_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.model import store
    from specdec.model.store import ModelRecord

    records = [
        ModelRecord("smol-here", "hub a/b", True, Path("/x"), 1),
        ModelRecord("smol-far", "hub c/d", False, None, 0),
        ModelRecord("other", "hub e/f", True, Path("/y"), 1),
    ]
    monkeypatch.setattr(store, "list_models", lambda: records)
    assert completion.removable_names("smol") == ["smol-here"]


@pytest.mark.parametrize(
    ("shell", "words"),
    [("bash", "complete -o default -F"), ("zsh", "compdef"), ("fish", "complete --command")],
)
def test_show_completion_prints_the_script(run: Run, shell: str, words: str) -> None:
    result = run("--show-completion", shell)
    assert result.exit_code == 0
    assert words in result.stdout
    assert "_SPECDEC_COMPLETE=complete_" in result.stdout


def test_install_completion(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = run("--install-completion", "bash")
    assert result.exit_code == 0
    script = tmp_path / ".bash_completions" / "specdec.sh"
    assert result.stdout == f"bash completion installed in {script}; it works in new terminals\n"
    assert "_specdec_completion" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()


def test_unknown_shell(run: Run) -> None:
    result = run("--show-completion", "tcsh")
    assert result.exit_code == 2
    assert "'tcsh'" in result.stderr


def test_bash_really_completes(tmp_path: Path) -> None:
    """The script, sourced by bash, offers what the command offers."""
    command = tmp_path / "specdec"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m specdec "$@"\n')
    command.chmod(0o755)
    script = (
        "source <(specdec --show-completion bash)\n"
        "COMP_WORDS=(specdec gen); COMP_CWORD=1\n"
        "_specdec_completion specdec\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["generate"], done.stderr
