"""Seeded random JSON schemas whose answers are all of bounded length."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "x", "tags", "first name", 'say "hi"', "größe", "a/b", "null", "is-ok", "π")
WORDS = ("red", "green", "", "a b", "true", '"', "\\", "día", "日本", "1", "new\nline")
PATTERNS = ("^[a-f]{2,5}$", "^(foo|bar)-[0-9]{2}$", "^[A-Z][a-z]{0,3}$", "^x?y{1,3}z$")


def random_schema(seed: int) -> Schema:
    """A schema of up to three levels: objects, arrays, anyOf, enums, constants and all scalars."""
    rng = random.Random(seed)
    definition = _scalar(rng)
    schema = _schema(rng, 2)
    if rng.random() < 0.3:
        # A reference, met once at the top and wherever the generator used it below.
        schema = {
            "type": "object",
            "properties": {"value": schema, "again": {"$ref": "#/$defs/thing"}},
            "required": ["again"],
            "additionalProperties": False,
            "$defs": {"thing": definition},
        }
    return schema


def _schema(rng: random.Random, levels: int) -> Schema:
    if levels == 0 or rng.random() < 0.2:
        return _scalar(rng)
    makers: tuple[Callable[[random.Random, int], Schema], ...] = (_object, _object, _array, _any_of)
    return rng.choice(makers)(rng, levels - 1)


def _object(rng: random.Random, levels: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(rng, levels) for name in names},
        "additionalProperties": False,
    }
    required = [name for name in names if rng.random() < 0.6]
    if required:
        schema["required"] = required
    return schema


def _array(rng: random.Random, levels: int) -> Schema:
    if rng.random() < 0.3:
        items = [_schema(rng, levels) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(rng, levels),
        "minItems": least,
        "maxItems": rng.randint(least, 3),
    }


def _any_of(rng: random.Random, levels: int) -> Schema:
    return {"anyOf": [_schema(rng, levels) for _ in range(rng.randint(2, 3))]}


def _scalar(rng: random.Random) -> Schema:
    makers = (_integer, _string, _pattern, _enum, _const, _boolean, _null, _nullable)
    return rng.choice(makers)(rng)


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-1500, 1500)
    schema: Schema = {"type": "integer"}
    schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.randint(2, 2000)
    return schema


def _string(rng: random.Random) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _enum(rng: random.Random) -> Schema:
    values: list[Any] = [*WORDS, 0, -7, 2.5, True, None, [1, "two"], {"a": [None]}]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice((*WORDS, 12, False, None, {"k": "v"}, []))}


def _boolean(rng: random.Random) -> Schema:
    return {"type": "boolean"}


def _null(rng: random.Random) -> Schema:
    return {"type": "null"}


def _nullable(rng: random.Random) -> Schema:
    return {**_string(rng), "type": ["string", "null"]}
