"""What an import costs and touches; each test asks a fresh interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def modules_after(statement: str) -> set[str]:
    """Names of the modules loaded after a statement ran in a fresh interpreter at the root."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ["specdec", "specdec.cli.main", "specdec_drafts"])
def test_import_is_light(module: str) -> None:
    heavy = {"torch", "transformers", "triton", "grpc"}
    assert not heavy & modules_after(f"import {module}")


def test_kernels_do_not_import_triton() -> None:
    assert "triton" not in modules_after("import specdec_kernels")


def test_specdec_does_not_import_evals() -> None:
    loaded = modules_after("import specdec.llm, specdec.rpc.server, specdec.cli.main")
    assert "specdec_evals" not in loaded


def test_transformers_does_not_take_our_folder_for_its_kernels_package() -> None:
    """Without an __init__.py our folder is at most a namespace, which transformers ignores."""
    loaded = modules_after(
        "from transformers import LlamaForCausalLM\n"
        "probed = getattr(sys.modules.get('kernels'), '__file__', None)\n"
        "assert probed is None or 'site-packages' in probed, probed"
    )
    assert "transformers.models.llama.modeling_llama" in loaded


@pytest.mark.parametrize("folder", ["kernels", "drafts", "evals"])
def test_source_folder_is_no_package(folder: str) -> None:
    assert (ROOT / folder / f"specdec_{folder}" / "__init__.py").is_file()
    assert not (ROOT / folder / "__init__.py").exists()


def test_tests_folders_are_packages() -> None:
    """Without these files a folder such as tests/kernels would be importable as `kernels`."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_environment_is_read_in_one_file() -> None:
    readers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "specdec").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in {"environ", "getenv"}
    }
    assert readers <= {"specdec/env.py"}
