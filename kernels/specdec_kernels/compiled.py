"""Builds the C++ forms for this machine's CPU, once, and loads them.

A source file becomes one shared library with a C interface, called through ctypes: it needs a
compiler and nothing else, neither torch's headers nor a build tool, and takes seconds. Libraries
are kept in the cache folder under a name made of everything that goes into them. OpenMP comes from
the runtime that torch has loaded, so that both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

ELEMENT_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}
"""How the C++ forms are told what a tensor's elements are."""

_COMPILERS = ("c++", "g++", "clang++")
# Contraction is off so that only what the source calls a fused multiply-add is one: the same
# expression must give the same bits wherever it is compiled.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fopenmp")
_TIMEOUT_S = 300


class CompileError(Exception):
    """The C++ form cannot be used on this machine, with the reason."""


@cache
def load_library(sources: tuple[Path, ...], defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The shared library of `sources[0]`, compiled now unless it is in the cache folder.

    sources: the file to compile, then the headers that it includes. defines: "NAME=value".

    Raises CompileError if `SPECDEC_COMPILE=0`, there is no compiler, it fails, or the cache folder
    cannot be written.
    """
    if os.environ.get("SPECDEC_COMPILE", "").strip() == "0":
        raise CompileError("SPECDEC_COMPILE=0 forbids it")
    compiler = find_compiler()
    options = [*_FLAGS, _machine_flag(), *(f"-D{define}" for define in defines)]
    name = f"{sources[0].stem}-{_key(compiler, options, sources)}.so"
    library = _cache_folder() / name
    try:
        if not library.exists():
            _compile(compiler, options, sources[0], library)
        # torch loads its OpenMP runtime for all to see; there the library finds it.
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CompileError(f"{library} cannot be made or loaded: {error}") from error


def find_compiler() -> str:
    """Path of the C++ compiler: `CXX`, or the first of c++, g++ and clang++ on PATH.

    Raises CompileError if there is none.
    """
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise CompileError(f"no C++ compiler: set CXX, or install one of {', '.join(_COMPILERS)}")


def _machine_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _cache_folder() -> Path:
    own = os.environ.get("SPECDEC_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(own) if own else Path(base) / "specdec"
    return folder.expanduser().absolute() / "compiled"


def _key(compiler: str, options: Sequence[str], sources: Sequence[Path]) -> str:
    """Changes with the sources, the options, the compiler, torch and the CPU ("native")."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    for text in (*options, compiler, version.stdout, torch.__version__, _cpu()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:20]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _compile(compiler: str, options: Sequence[str], source: Path, library: Path) -> None:
    from tqdm import tqdm

    library.parent.mkdir(parents=True, exist_ok=True)
    # Written under another name first: another process may look at any time.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        # Linking must not name an OpenMP library, or there would be two in the process.
        steps = [
            [compiler, *(o for o in options if o != "-shared"), "-c", str(source), "-o",
             str(made.with_suffix(".o"))],
            [compiler, "-shared", str(made.with_suffix(".o")), "-o", str(made)],
        ]  # fmt: skip
        label = f"Compiling {source.stem} for this CPU (once)"
        for step in tqdm(steps, desc=label, bar_format="{desc} {elapsed}", disable=None):
            done = subprocess.run(
                step, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
            if done.returncode != 0:
                raise CompileError(f"{' '.join(step)} failed:\n{done.stderr[-2000:]}")
        os.replace(made, library)
