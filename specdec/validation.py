"""Checks of single values; each raises InvalidRequestError with the field and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence

from specdec.errors import InvalidRequestError


def number(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """A finite number in [low, high], or (low, high]."""
    bracket = "(" if open_low else "["
    allowed = f"must be a finite number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequestError(field, f"{allowed}, got {value!r}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if math.isnan(result) or not low <= result <= high or (open_low and result == low):
        raise InvalidRequestError(field, f"{allowed}, got {value!r}")
    return result


def integer(field: str, value: object, low: int, high: int | None = None) -> int:
    """An integer of at least low and, unless high is None, at most high."""
    allowed = f"must be an integer of at least {low}"
    if high is not None:
        allowed = f"must be an integer in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequestError(field, f"{allowed}, got {value!r}")
    result = int(value)
    if result < low or (high is not None and result > high):
        raise InvalidRequestError(field, f"{allowed}, got {value!r}")
    return result


def boolean(field: str, value: object) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise InvalidRequestError(field, f"must be true or false, got {value!r}")
    return value


def string(field: str, value: object) -> str:
    """A string with at least one character."""
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(field, f"must be a non-empty string, got {value!r}")
    return value


def items(field: str, value: object, what: str) -> tuple[object, ...]:
    """The elements of a list or other iterable that is no string."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequestError(field, f"must be a list of {what}, got {value!r}")
    return tuple(value)


def strings(field: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Non-empty strings; one string stands for a list of one, None for an empty list."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    return tuple(string(field, item) for item in items(field, value, "strings"))


def token_ids(field: str, value: Sequence[int] | None) -> tuple[int, ...]:
    """Token ids, which are integers of at least 0; None stands for an empty list."""
    if value is None:
        return ()
    return tuple(integer(field, item, 0) for item in items(field, value, "token ids"))
