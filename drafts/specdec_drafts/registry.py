"""The one place that knows drafters by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec_drafts.base import Drafter
from specdec_drafts.ngram import NgramDrafter
from specdec_drafts.none import NoDrafter

_DRAFTERS: dict[str, tuple[Callable[[], Drafter], str]] = {
    "none": (NoDrafter, "no drafts: plain decoding"),
    "ngram": (
        NgramDrafter,
        "continuations of earlier occurrences of the last 1-4 tokens in prompt and output",
    ),
}


def available_drafters() -> dict[str, str]:
    """Name to one-line description of every drafter."""
    return {name: description for name, (_, description) in _DRAFTERS.items()}


def make_drafters(draft: str | Drafter | Sequence[str | Drafter] | None) -> list[Drafter]:
    """Drafters from a name, a Drafter, or a list of these; None is "none".

    Raises ValueError for an unknown name or two drafters of one name.
    """
    items: Sequence[str | Drafter]
    if draft is None:
        items = ["none"]
    elif isinstance(draft, str | Drafter):
        items = [draft]
    else:
        items = draft
    drafters = [_make(item) for item in items]
    names = [drafter.name for drafter in drafters]
    if len(set(names)) != len(names):
        raise ValueError(f"each drafter needs a name of its own, got {', '.join(names)}")
    return drafters


def _make(item: str | Drafter) -> Drafter:
    if not isinstance(item, str):
        return item
    if item not in _DRAFTERS:
        known = ", ".join(_DRAFTERS)
        raise ValueError(f"unknown drafter {item!r}; known are {known}")
    return _DRAFTERS[item][0]()
