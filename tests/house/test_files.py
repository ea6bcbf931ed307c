"""The files at the root agree with each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def test_constraints_are_versions_that_resolve_anywhere() -> None:
    for requirement in constraints().values():
        assert requirement.url is None
        assert "+" not in str(requirement.specifier), requirement


def test_constraints_pin_every_dependency_within_its_bounds() -> None:
    pinned = constraints()
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    for text in wanted:
        requirement = Requirement(text)
        pin = pinned[canonicalize_name(requirement.name)]
        (upper,) = (s.version for s in pin.specifier if s.operator in {"==", "<="})
        assert requirement.specifier.contains(upper), (text, str(pin))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documented_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = (ROOT / document).read_text()
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE))
    assert named
    assert named <= targets


def test_links_lead_somewhere() -> None:
    """Every relative link of a Markdown file leads to a file of the project."""
    folders = (".", "docs", "drafts", "kernels", "evals", "proto", "specdec", "tests")
    broken = [
        (str(path.relative_to(ROOT)), target)
        for folder in folders
        for path in (ROOT / folder).glob("*.md")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not broken


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / "README.md").read_text()
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
