"""What an installed copy consists of."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("specdec", "drafts", "kernels", "evals")
PACKAGES = {"specdec", "specdec_drafts", "specdec_evals", "specdec_kernels"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy: a build writes into the folder it builds from."""
    copy = tmp_path_factory.mktemp("source") / "clone"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*SOURCES, "tests", "proto"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"],
        cwd=copy,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    names = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == PACKAGES


def test_every_package_is_typed_and_complete(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    expected = {
        str(path.relative_to(base))
        for base in (ROOT, ROOT / "drafts", ROOT / "kernels", ROOT / "evals")
        for package in PACKAGES
        for path in (base / package).rglob("*.py")
    }
    assert expected <= names


def test_data_licence_and_command(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "specdec_evals/prompts.jsonl" in names
    assert "specdec_kernels/checks/compiled.json" in names
    (licence,) = (name for name in names if name.endswith("licenses/LICENSE"))
    assert b"Apache License" in wheel.read(licence)
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "specdec = specdec.cli.main:app" in wheel.read(entry_points).decode()
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    assert "License-Expression: Apache-2.0" in wheel.read(metadata).decode()
