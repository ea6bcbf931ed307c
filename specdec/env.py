"""The only reader of the process environment."""

from __future__ import annotations

import os
from pathlib import Path

_TRUE = {"1", "on", "yes", "true"}


def cache_dir() -> Path:
    """Folder for downloads and converted models; not created here.

    `SPECDEC_CACHE`, else `$XDG_CACHE_HOME/specdec`, else `~/.cache/specdec`.
    """
    own = os.environ.get("SPECDEC_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache").absolute() / "specdec"


def hub_offline() -> bool:
    """Whether the user forbade network access to the model hub (`HF_HUB_OFFLINE`)."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").strip().lower() in _TRUE for name in names)
