"""What the text of an answer must look like, as the caller states it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec import validation
from specdec.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The set of texts that an answer may be; exactly one field says it.

    json_schema: JSON that obeys this schema (a mapping, or its JSON text).
    json_object: any JSON object.
    regex: text that the regular expression matches as a whole (Rust's syntax, no look-around).
    choice: one of these strings.
    ebnf: text derived from a grammar, in Lark's or llama.cpp's (GBNF) notation.

    Raises InvalidRequestError naming the field. Whether the content compiles shows when a request
    is added.
    """

    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    ebnf: str | None = None

    def __post_init__(self) -> None:
        validation.boolean("grammar.json_object", self.json_object)
        names = [field.name for field in dataclasses.fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                "grammar", f"needs exactly one of {', '.join(names)}, got {given or 'none'}"
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            choices = validation.strings("grammar.choice", self.choice)
            if not choices:
                raise InvalidRequestError("grammar.choice", "must name at least one string")
            object.__setattr__(self, "choice", choices)
        for name in ("regex", "ebnf"):
            if getattr(self, name) is not None:
                validation.string(f"grammar.{name}", getattr(self, name))

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        if self.json_object:
            return "json_object"
        kinds = ("json_schema", "regex", "choice", "ebnf")
        return next(name for name in kinds if getattr(self, name) is not None)


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    field = "grammar.json_schema"
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(parsed)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, f"is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError(field, f"must be a JSON object, got {text}")
    return text
