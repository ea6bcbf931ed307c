"""How much memory there is, and refusing in time what does not fit."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import ModelError

_MIB, _GIB = 1 << 20, 1 << 30


def available_memory() -> int:
    """Bytes this process can still take: the system's, or its container's where that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # Cached file pages count as used but are given back on demand.
        cached = dict(
            line.split() for line in (group / "memory.stat").read_text().splitlines()
        ).get("inactive_file", "0")
    except (OSError, ValueError):
        return free
    return min(free, max(limit - used + int(cached), 0))


def require_memory(needed: int, *, what: str, available: int | None = None) -> None:
    """Refuse `what` if it needs more memory than there is.

    Args:
        needed: bytes.
        what: the work, to name it in the message.
        available: bytes at hand; None asks the system.

    Raises:
        ModelError: names what is needed and what is there.
    """
    have = available_memory() if available is None else available
    if needed > have:
        raise ModelError(
            f"{what} needs {_amount(needed)} of memory and {_amount(have)} are free: "
            "close other programs, use a smaller model or a smaller dtype"
        )


def _amount(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB"
