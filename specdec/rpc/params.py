"""SamplingParams and Speculation on the wire, both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specdec.errors import InvalidRequestError
from specdec.grammar import Grammar
from specdec.request import SamplingParams, Speculation, SpeculationMode
from specdec.v1 import inference_pb2 as pb

# Read from the contract, so that a scalar or a list that is added there is carried.
_FIELDS = pb.SamplingParams.DESCRIPTOR.fields
_SCALARS = [f.name for f in _FIELDS if f.message_type is None and not f.is_repeated]
_LISTS = [f.name for f in _FIELDS if f.message_type is None and f.is_repeated]
_DEFAULTS = SamplingParams()
_SPECULATION_SCALARS = ("max_nodes", "max_depth", "acceptance")
_MODES = {
    SpeculationMode.OFF: pb.SPECULATION_MODE_OFF,
    SpeculationMode.FIXED: pb.SPECULATION_MODE_FIXED,
    SpeculationMode.AUTO: pb.SPECULATION_MODE_AUTO,
}
_MODES_BACK = {value: mode for mode, value in _MODES.items()}


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """Raise InvalidRequestError with this field for a value that no message can hold."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(field, f"cannot be sent: {error}") from error


# Server side.


def sampling_params_of(message: pb.SamplingParams) -> SamplingParams:
    """The sampling parameters that are set; the others stay the model's defaults.

    Raises InvalidRequestError naming the field.
    """
    values = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    values |= {name: tuple(items) for name in _LISTS if (items := getattr(message, name))}
    if message.logit_bias:
        values["logit_bias"] = dict(message.logit_bias)
    if message.bad_words:
        values["bad_words"] = [_bad_word_of(word) for word in message.bad_words]
    if message.HasField("grammar"):
        values["grammar"] = _grammar_of(message.grammar)
    return SamplingParams(**values)


def _bad_word_of(message: pb.BadWord) -> str | Sequence[int]:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError("bad_words", "each must have one of text and token_ids")
    return message.text if kind == "text" else tuple(message.token_ids.ids)


def _grammar_of(message: pb.Grammar) -> Grammar:
    kind = message.WhichOneof("kind")
    if kind is None:
        kinds = ", ".join(field.name for field in pb.Grammar.DESCRIPTOR.fields)
        raise InvalidRequestError("grammar", f"must have one of {kinds}")
    if kind == "json_object" and not message.json_object:
        raise InvalidRequestError("grammar.json_object", "must be true, or left out")
    value = tuple(message.choice.choices) if kind == "choice" else getattr(message, kind)
    fields: dict[str, Any] = {kind: value}
    try:
        return Grammar(**fields)
    except RecursionError as error:
        raise InvalidRequestError(f"grammar.{kind}", "is nested too deeply") from error


def speculation_of(message: pb.Speculation, defaults: Speculation) -> Speculation:
    """The defaults with the fields that are set replaced. Raises InvalidRequestError."""
    changes = {
        name: getattr(message, name) for name in _SPECULATION_SCALARS if message.HasField(name)
    }
    if message.mode != pb.SPECULATION_MODE_UNSPECIFIED:
        if message.mode not in _MODES_BACK:
            raise InvalidRequestError("speculation.mode", f"unknown value {message.mode}")
        changes["mode"] = _MODES_BACK[message.mode]
    if message.drafts:
        changes["drafts"] = tuple(message.drafts)
    return dataclasses.replace(defaults, **changes)


# Client side.


def sampling_params_to_wire(params: SamplingParams) -> pb.SamplingParams:
    """What differs from the defaults. Raises InvalidRequestError for what cannot be sent."""
    if params.logits_processors:
        raise InvalidRequestError(
            "logits_processors",
            "are Python functions, which cannot be sent to a server: use specdec.LLM, or say it "
            "with logit_bias, allowed_token_ids, bad_words or grammar",
        )
    message = pb.SamplingParams()
    for name in _SCALARS:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            with naming_field(name):
                setattr(message, name, value)
    for name in _LISTS:
        with naming_field(name):
            getattr(message, name).extend(getattr(params, name) or ())
    with naming_field("logit_bias"):
        for token, bias in (params.logit_bias or {}).items():
            message.logit_bias[token] = bias
    with naming_field("bad_words"):
        for word in params.bad_words or ():
            if isinstance(word, str):
                message.bad_words.add(text=word)
            else:
                message.bad_words.add(token_ids=pb.TokenIds(ids=word))
    if params.grammar is not None:
        kind = params.grammar.kind
        with naming_field(f"grammar.{kind}"):
            message.grammar.CopyFrom(_grammar_to_wire(kind, params.grammar))
    return message


def _grammar_to_wire(kind: str, grammar: Grammar) -> pb.Grammar:
    value = getattr(grammar, kind)
    if kind == "choice":
        return pb.Grammar(choice=pb.ChoiceConstraint(choices=value))
    return pb.Grammar(**{kind: value})


def speculation_to_wire(speculation: Speculation) -> pb.Speculation:
    """All fields: those of the record replace the server's defaults."""
    with naming_field("speculation"):
        return pb.Speculation(
            mode=_MODES[SpeculationMode(speculation.mode)],
            drafts=speculation.drafts,
            **{name: getattr(speculation, name) for name in _SPECULATION_SCALARS},
        )
