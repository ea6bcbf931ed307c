"""Where a number came from: command, commit, machine, versions."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("specdec-server", "torch", "transformers", "tokenizers", "numpy", "triton")


def provenance() -> dict[str, Any]:
    """JSON-able facts about this process: command, time (UTC), commit, machine, versions."""
    import torch

    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": cpu_name(),
            "cores": psutil.cpu_count(logical=False),
            "threads": torch.get_num_threads(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        },
        "versions": {"python": platform.python_version(), **package_versions()},
    }


def commit() -> str | None:
    """Commit of the checkout this package runs from, "-dirty" appended if files differ from it.

    None outside a checkout.
    """
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() if head.returncode == 0 else None


def cpu_name() -> str:
    """The processor's name as the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide a result, those that are installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
