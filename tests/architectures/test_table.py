"""docs/models.md says what the tests check."""

from __future__ import annotations

import pytest

from tests.architectures.table import DOCUMENT, render


def test_the_document_is_current() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert render(document) == document, "run: python -m tests.architectures.table"


def test_a_stale_table_is_seen() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    stale = document.replace("| Mixtral |", "| Mixtrol |")
    assert stale != document
    assert render(stale) == document


def test_a_lost_marker_is_seen() -> None:
    with pytest.raises(ValueError, match="unpack"):
        render("no tables here")
