"""The generated code is fresh, and the messages have every field of the Python API."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import InvalidRequestError, SpecdecError
from specdec.grammar import Grammar
from specdec.request import SamplingParams, Speculation, SpeculationMode
from specdec.rpc import convert
from specdec.rpc.params import sampling_params_of, speculation_of
from specdec.v1 import inference_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PYTHON_ONLY = {"logits_processors"}

VALUES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7],
    "top_k": [0, 50],
    "top_p": [0.95, 1.0],
    "min_p": [0.0, 0.1],
    "repetition_penalty": [1.0, 1.1],
    "presence_penalty": [-0.5],
    "frequency_penalty": [0.3],
    "logit_bias": [{0: -100.0, 7: 0.1, 2**32 - 1: 3.0}],
    "allowed_token_ids": [(0, 7, 511)],
    "bad_words": [("a word", (7,), (0, 8, 9), " é\n")],
    "min_tokens": [3],
    "grammar": [
        Grammar(json_schema={"type": "object", "properties": {"é": {"const": None}}}),
        Grammar(json_object=True),
        Grammar(regex="[a-z]+"),
        Grammar(choice=["yes", "no\n"]),
        Grammar(ebnf='root ::= "a"'),
    ],
    "seed": [0, 2**64 - 1],
    "n": [3],
    "stop": [("a", "b\n")],
    "stop_token_ids": [(0, 7)],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "max_tokens": [1],
    "skip_special_tokens": [False],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "cache_salt": ["mine"],
}
"""Each field of SamplingParams, with values other than its default."""


def over_the_wire(params: SamplingParams | None) -> SamplingParams:
    data = convert.request_to_wire("x", params).SerializeToString()
    request = pb.GenerateRequest.FromString(data)
    convert.refuse_unknown_fields(request)
    return sampling_params_of(request.sampling_params)


def test_generated_code_is_fresh() -> None:
    pytest.importorskip("grpc_tools")
    command = [sys.executable, str(ROOT / "proto" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("message", "record", "missing"),
    [
        (pb.SamplingParams, SamplingParams, PYTHON_ONLY),
        (pb.Speculation, Speculation, set()),
        (pb.Grammar, Grammar, set()),
    ],
)
def test_messages_have_every_field(message: Any, record: type, missing: set[str]) -> None:
    on_wire = {field.name for field in message.DESCRIPTOR.fields}
    assert on_wire == {field.name for field in dataclasses.fields(record)} - missing


def test_every_scalar_of_a_request_has_presence() -> None:
    for message in (pb.SamplingParams, pb.Speculation):
        for field in message.DESCRIPTOR.fields:
            assert field.has_presence or field.is_repeated, field.full_name


@pytest.mark.parametrize("name", sorted(f.name for f in dataclasses.fields(SamplingParams)))
def test_every_field_survives_the_wire(name: str) -> None:
    if name in PYTHON_ONLY:
        params = SamplingParams(logits_processors=[lambda ids, scores: scores])
        with pytest.raises(InvalidRequestError, match="cannot be sent") as caught:
            convert.request_to_wire("x", params)
        assert caught.value.field == name
        return
    for value in VALUES[name]:
        params = SamplingParams(**{name: value})
        assert params != SamplingParams()
        back = over_the_wire(params)
        assert back == params
        assert getattr(back, name) == value


def test_all_fields_together_survive_the_wire() -> None:
    values = {name: values[-1] for name, values in VALUES.items()}
    params = SamplingParams(**values | {"ignore_eos": False, "max_tokens": 9})
    assert over_the_wire(params) == params


def test_unset_fields_stay_unset() -> None:
    assert over_the_wire(None) == SamplingParams()
    message = convert.request_to_wire("x", SamplingParams()).sampling_params
    assert message.ByteSize() == 0, "a server of an earlier contract must be able to take this"
    zero = pb.SamplingParams(temperature=0.0, seed=0, logprobs=0)
    params = sampling_params_of(zero)
    assert (params.temperature, params.seed, params.logprobs) == (0.0, 0, 0)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", {"max_tokens": 2**32}),
        ("top_k", {"top_k": 2**31}),
        ("logit_bias", {"logit_bias": {2**32: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [2**40]}),
        ("bad_words", {"bad_words": [[2**40]]}),
        ("bad_words", {"bad_words": ["\ud800"]}),
        ("stop", {"stop": ["\ud800"]}),
        ("cache_salt", {"cache_salt": "\ud800"}),
        ("grammar.regex", {"grammar": Grammar(regex="\ud800")}),
        ("grammar.choice", {"grammar": Grammar(choice=["\ud800"])}),
    ],
)
def test_what_no_message_can_hold_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be sent") as caught:
        convert.request_to_wire("x", SamplingParams(**values))
    assert caught.value.field == field


def test_speculation_survives_the_wire_and_fills_in_defaults() -> None:
    speculation = Speculation(mode="fixed", max_nodes=0, max_depth=3, drafts=["ngram"])
    message = convert.request_to_wire("x", None, speculation).speculation
    assert speculation_of(message, Speculation(mode="off", max_nodes=9)) == speculation
    partial = pb.Speculation(mode=pb.SPECULATION_MODE_OFF)
    defaults = Speculation(mode="auto", max_nodes=9, max_depth=4)
    expected = dataclasses.replace(defaults, mode=SpeculationMode.OFF)
    assert speculation_of(partial, defaults) == expected


def test_a_finish_reason_of_a_later_contract_is_an_error() -> None:
    complete = pb.GenerateComplete()
    complete.finish_reason = 99  # type: ignore[assignment]
    with pytest.raises(SpecdecError, match="finish_reason"):
        convert.delta_of_complete("a", complete)
