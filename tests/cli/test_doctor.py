"""`specdec doctor`: what it looks at, what it says, and when it fails."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import examine, selftest
from specdec.cli.examine import Check, State
from tests.cli.conftest import Run

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ["versions", "parts", "machine", "models", "self-test"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "generate_both_ways", lambda: "32 tokens")
    monkeypatch.setattr(selftest, "serve_once", lambda: "32 tokens")


def by_name(run: Run, status: int = 0) -> dict[str, dict[str, str]]:
    result = run("doctor", "--json")
    assert result.exit_code == status, result.output
    report = json.loads(result.stdout)
    assert report["works"] == (status == 0)
    return {check["name"]: check for check in report["checks"]}


def test_everything_is_examined(run: Run) -> None:
    checks = by_name(run)
    assert list(dict.fromkeys(check["group"] for check in checks.values())) == GROUPS
    for name in ("python", "specdec", "torch", "transformers", "grpcio", "cpu", "threads",
                 "kernels", "memory", "gpu", "cache", "smollm2-135m-instruct"):  # fmt: skip
        assert checks[name]["found"], name
    assert checks["torch"]["found"] == metadata.version("torch")
    assert "32 tokens of a tiny model, the same with and without" in checks["generate"]["found"]
    assert "32 tokens over gRPC from 127.0.0.1:" in checks["serve"]["found"]


@pytest.mark.usefixtures("quick")
def test_table(run: Run) -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert [line for line in lines if line in GROUPS] == GROUPS
    assert lines[-1] == "Everything needed works."
    assert len({line.index(" ok ") for line in lines if " ok " in line}) == 1
    assert "\x1b" not in result.stdout


@pytest.mark.usefixtures("quick")
def test_what_is_missing_comes_with_the_command(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr("specdec.model.resolve.hub_snapshot", lambda hub_id: None)
    version = examine._version
    monkeypatch.setattr(examine, "_version", lambda name: None if name == "peft" else version(name))
    monkeypatch.setattr(examine, "_requirements", lambda extra="": {})
    checks = by_name(run)
    model = checks["smollm2-135m-instruct"]
    assert (model["state"], model["fix"]) == (
        "missing",
        "specdec models fetch smollm2-135m-instruct",
    )
    assert (checks["peft"]["state"], checks["peft"]["fix"]) == ("missing", 'pip install "peft"')
    assert checks["packages"]["state"] == "note"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("present", "words"), [(None, "not installed"), ("0.1", "0.1, but >=")], ids=["absent", "old"]
)
def test_a_needed_package_that_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, present: str | None, words: str
) -> None:
    version = examine._version
    monkeypatch.setattr(
        examine, "_version", lambda name: present if name == "safetensors" else version(name)
    )
    check = by_name(run, status=1)["safetensors"]
    assert check["state"] == "broken"
    assert check["found"].startswith(words)
    assert check["fix"].startswith('pip install "safetensors>=')
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "Broken: safetensors."


@pytest.mark.usefixtures("quick")
def test_a_check_that_raises_is_broken_and_the_others_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> str:
        raise ImportError("libfoo.so:\n no such file")

    monkeypatch.setattr(selftest, "generate_both_ways", fails)
    checks = by_name(run, status=1)
    assert checks["generate"]["state"] == "broken"
    assert checks["generate"]["found"] == "ImportError: libfoo.so: no such file"
    assert checks["serve"]["state"] == "ok"


@pytest.mark.usefixtures("quick")
def test_a_cache_that_cannot_be_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "a" / "b"))
    monkeypatch.setattr(examine.os, "access", lambda path, mode: Path(path) != tmp_path)
    assert "SPECDEC_CACHE" in by_name(run, status=1)["cache"]["fix"]


def test_the_self_test_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def generate(self, prompt: Any, params: Any, *, speculation: Any) -> list[Any]:
            from specdec.output import RequestOutput, RequestStats
            from specdec.request import FinishReason

            ids = (1, 2) if speculation.mode.value == "off" else (1, 3)
            return [
                RequestOutput("a", (1,), ids, "", FinishReason.STOP, None, None, 0, RequestStats())
            ]

    monkeypatch.setattr(selftest, "_tiny_llm", Wrong)
    checks = {
        check.name: check for check in examine._guarded("self-test", "generate", examine._generates)
    }
    assert checks["generate"].state is State.BROKEN


@pytest.mark.parametrize(
    ("flags", "state"),
    [(["avx512_bf16"], State.OK), (["avx2"], State.NOTE), ([], State.OK)],
)
def test_cpu_features(flags: list[str], state: State) -> None:
    check = examine._cpu_features(flags)
    assert check.state is state
    assert ("avx512_bf16" in check.found) == ("avx512_bf16" in flags)


def test_distribution_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == examine.DISTRIBUTION
    for name, (extra, _) in examine._PARTS.items():
        lines = [*project["dependencies"], *project["optional-dependencies"].get(extra, [])]
        assert [line for line in lines if line.startswith(name)], name


def test_fixes_come_below_what_they_fix() -> None:
    from rich.console import Console

    from specdec.cli.doctor import table_of

    console = Console(width=60, highlight=False)
    with console.capture() as capture:
        console.print(table_of([Check("parts", "peft", State.MISSING, "for adapters", "pip it")]))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert lines == ["parts", "  peft  missing  for adapters", "                 -> pip it"]
