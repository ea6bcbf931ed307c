"""What `specdec doctor` looks at: each function examines one thing and never raises."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from specdec import __version__
from specdec.model.catalog import CATALOG, DEFAULT_MODEL

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "specdec-server"

_SHOWN = ("torch", "transformers", "tokenizers", "numpy", "grpcio", "protobuf")
_PARTS = {
    "llguidance": ("grammar", "grammars: --json-schema, --regex, ..."),
    "peft": ("lora", "LoRA adapters: --adapter"),
    "triton": ("gpu", "kernels for a GPU"),
}
"""Package to the extra of specdec that brings it (unless it is required) and what it is for."""

_CPU_FEATURES = {
    "avx512_bf16": "bf16 arithmetic",
    "amx_bf16": "bf16 matrix tiles",
}
_ENOUGH_DISK = 1_000_000_000
"""Bytes that fetching and converting the default model takes, with room to spare."""


class State(StrEnum):
    """ok; note: works, but worth knowing; missing: not there, nothing needs it; broken: needed."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Check:
    """What was found about one thing, and, unless it is fine, what to do about it."""

    group: str
    name: str
    state: State
    found: str
    fix: str = ""


def examine() -> Iterator[Check]:
    """All checks, one after the other; the self-test last, which takes a few seconds."""
    groups: list[tuple[str, str, Callable[[], list[Check]]]] = [
        ("versions", "packages", _packages),
        ("parts", "parts", _parts),
        ("machine", "cpu", _cpu),
        ("machine", "kernels", _kernels),
        ("machine", "memory", _memory),
        ("machine", "gpu", _gpu),
        ("models", "cache", _cache),
        ("models", DEFAULT_MODEL, _default_model),
        ("self-test", "generate", _generates),
        ("self-test", "serve", _serves),
    ]
    for group, name, function in groups:
        yield from _guarded(group, name, function)


def _guarded(group: str, name: str, function: Callable[[], list[Check]]) -> list[Check]:
    """What a function found; a broken check of this name if it raised."""
    try:
        return function()
    # Whatever is wrong with an installation shows as any kind of error.
    except Exception as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())
        advice = "if nothing above explains it, please report it"
        return [Check(group, name, State.BROKEN, found, advice)]


def _packages() -> list[Check]:
    python = platform.python_version()
    checks = [
        Check("versions", "python", State.OK, f"{python}, {sys.executable}"),
        Check("versions", "specdec", State.OK, __version__),
    ]
    requirements = _requirements()
    if not requirements:
        fix = "pip install . in its folder checks the versions of what it needs"
        checks.append(Check("versions", "packages", State.NOTE, "specdec is not installed", fix))
    fine = []
    for name in dict.fromkeys([*_SHOWN, *requirements]):
        check = _package(name, requirements.get(name))
        if check.state is State.OK and name not in (*_SHOWN, *_PARTS):
            fine.append(name)
        else:
            checks.append(check)
    if fine:
        checks.append(Check("versions", "others", State.OK, f"{len(fine)} packages as required"))
    return checks


def _package(name: str, requirement: Requirement | None) -> Check:
    wanted = f"{name}{requirement.specifier}" if requirement is not None else name
    fix = f'pip install "{wanted}"'
    version = _version(name)
    if version is None:
        return Check("versions", name, State.BROKEN, "not installed", fix)
    if requirement is not None and not requirement.specifier.contains(version, prereleases=True):
        found = f"{version}, but {requirement.specifier} is needed"
        return Check("versions", name, State.BROKEN, found, fix)
    return Check("versions", name, State.OK, version)


def _requirements(extra: str = "") -> dict[str, Requirement]:
    """What the installed specdec needs on this platform, by name, with or without an extra."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    all_of_them = [Requirement(line) for line in lines]
    return {
        item.name: item
        for item in all_of_them
        if item.marker is None or item.marker.evaluate({"extra": extra})
    }


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _parts() -> list[Check]:
    required = _requirements()
    checks = []
    for name, (extra, purpose) in _PARTS.items():
        if name in required:  # shown among the versions
            continue
        check = _package(name, _requirements(extra).get(name))
        state = State.OK if check.state is State.OK else State.MISSING
        checks.append(Check("parts", name, state, f"{check.found} ({purpose})", check.fix))
    return checks


def _cpu() -> list[Check]:
    import torch

    fields = _cpu_fields()
    name = fields.get("model name") or platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    state, fix = State.OK, ""
    if cores is not None and threads > cores:
        state, fix = State.NOTE, f"set OMP_NUM_THREADS={cores}: more threads than cores are slower"
    found = f"{threads} on {cores} cores"
    return [
        Check("machine", "cpu", State.OK, name),
        _cpu_features(fields.get("flags", "").split()),
        Check("machine", "threads", state, found, fix),
    ]


def _cpu_fields() -> dict[str, str]:
    """What Linux says about the first core; nothing elsewhere."""
    info = Path("/proc/cpuinfo")
    first = info.read_text().partition("\n\n")[0] if info.exists() else ""
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_features(flags: Sequence[str]) -> Check:
    import torch

    level = torch.backends.cpu.get_cpu_capability()
    has = [f"{flag} ({what})" for flag, what in _CPU_FEATURES.items() if flag in flags]
    found = ", ".join([level, *has])
    if flags and not {"avx512_bf16", "amx_bf16"} & set(flags):
        fix = "try --dtype fp32: without instructions for bf16 it may be faster"
        return Check("machine", "features", State.NOTE, found, fix)
    return Check("machine", "features", State.OK, found)


def _kernels() -> list[Check]:
    from specdec_kernels.tree_attention.cpu import compile_problem

    problem = compile_problem()
    if problem is None:
        return [Check("machine", "kernels", State.OK, "compiled for this CPU")]
    found = f"in torch, which is slower: {' '.join(problem.split())}"
    fix = "install a C++ compiler (on Debian and Ubuntu: g++)"
    return [Check("machine", "kernels", State.NOTE, found, fix)]


def _memory() -> list[Check]:
    import psutil

    from specdec.model.memory import available_memory

    total = psutil.virtual_memory().total
    found = f"{_gigabytes(available_memory())} free of {_gigabytes(total)}"
    return [Check("machine", "memory", State.OK, found)]


def _gpu() -> list[Check]:
    import torch

    if not torch.cuda.is_available():
        return [Check("machine", "gpu", State.OK, "none; models run on the CPU")]
    devices = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        devices.append(f"{device.name}, {_gigabytes(device.total_memory)}")
    return [Check("machine", "gpu", State.OK, "; ".join(devices))]


def _cache() -> list[Check]:
    from specdec.env import cache_dir

    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {_gigabytes(free)} free"
    if not os.access(existing, os.W_OK):
        fix = "set SPECDEC_CACHE to a folder that can be written"
        return [Check("models", "cache", State.BROKEN, f"{folder} cannot be written", fix)]
    if free < _ENOUGH_DISK:
        fix = "free some space, or set SPECDEC_CACHE to a folder on another disk"
        return [Check("models", "cache", State.NOTE, found, fix)]
    return [Check("models", "cache", State.OK, found)]


def _default_model() -> list[Check]:
    from specdec.model.resolve import named_folder

    folder = named_folder(CATALOG[DEFAULT_MODEL])
    if folder is not None:
        return [Check("models", DEFAULT_MODEL, State.OK, str(folder))]
    fix = f"specdec models fetch {DEFAULT_MODEL}"
    return [Check("models", DEFAULT_MODEL, State.MISSING, "not fetched yet", fix)]


def _generates() -> list[Check]:
    from specdec.cli.selftest import generate_both_ways

    return [Check("self-test", "generate", State.OK, generate_both_ways())]


def _serves() -> list[Check]:
    from specdec.cli.selftest import serve_once

    return [Check("self-test", "serve", State.OK, serve_once())]


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
