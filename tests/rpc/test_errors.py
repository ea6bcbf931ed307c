"""A wrong request is refused with the field's name, before it takes a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specdec.errors import InvalidRequestError
from specdec.grammar import Grammar
from specdec.request import SamplingParams, Speculation
from specdec.rpc.client import Client
from specdec.rpc.errors import ServerError
from specdec.testing import page_check
from specdec.v1 import inference_pb2 as pb
from tests.rpc.running import RunningServer

Change = Callable[[pb.GenerateRequest], Any]

NAN = float("nan")
DEEP = '{"items":' * 20_000 + "{}" + "}" * 20_000
GRAMMAR = pb.Grammar(regex="a*")


def choice(*choices: str) -> pb.Grammar:
    return pb.Grammar(choice=pb.ChoiceConstraint(choices=choices))


WRONG_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    *(("temperature", {"temperature": value}) for value in (-0.1, 100.5, NAN, float("inf"))),
    *(("top_p", {"top_p": value}) for value in (0.0, 1.1, NAN)),
    ("top_k", {"top_k": -2}),
    *(("min_p", {"min_p": value}) for value in (-0.1, 1.1, NAN)),
    *(("frequency_penalty", {"frequency_penalty": value}) for value in (-2.1, 2.1, NAN)),
    *(("presence_penalty", {"presence_penalty": value}) for value in (-2.1, 2.1, NAN)),
    *(("repetition_penalty", {"repetition_penalty": value}) for value in (0.0, 101.0, NAN)),
    ("max_tokens", {"max_tokens": 0}),
    ("stop", {"stop": ["a", ""]}),
    ("stop_token_ids", {"stop_token_ids": [512]}),
    ("ignore_eos", {"ignore_eos": True, "grammar": GRAMMAR}),
    *(("logprobs", {"logprobs": value}) for value in (513, 2**31)),
    *(("prompt_logprobs", {"prompt_logprobs": value}) for value in (513, 2**31)),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    *(("n", {"n": value}) for value in (0, 129)),
    ("cache_salt", {"cache_salt": ""}),
    *(("logit_bias", {"logit_bias": {7: value}}) for value in (-100.5, 100.5, NAN)),
    ("logit_bias", {"logit_bias": {512: 1.0}}),
    ("allowed_token_ids", {"allowed_token_ids": [1, 512]}),
    ("bad_words", {"bad_words": [pb.BadWord()]}),
    ("bad_words", {"bad_words": [pb.BadWord(text="")]}),
    ("bad_words", {"bad_words": [pb.BadWord(token_ids=pb.TokenIds())]}),
    ("bad_words", {"bad_words": [pb.BadWord(token_ids=pb.TokenIds(ids=[1, 512]))]}),
    ("grammar", {"grammar": pb.Grammar()}),
    ("grammar.json_object", {"grammar": pb.Grammar(json_object=False)}),
    *(
        ("grammar.json_schema", {"grammar": pb.Grammar(json_schema=value)})
        for value in ("", "{", "[1]", '{"type": "nothing"}', DEEP)
    ),
    *(("grammar.regex", {"grammar": pb.Grammar(regex=value)}) for value in ("", "(", "(?=a)")),
    *(("grammar.choice", {"grammar": value}) for value in (choice(), choice("a", ""))),
    *(("grammar.ebnf", {"grammar": pb.Grammar(ebnf=value)}) for value in ("", "root ::= (")),
]
"""Field and message for every way in which a sampling parameter can be out of range."""
NEVER_WRONG = {"include_stop_str_in_output", "seed", "skip_special_tokens"}
PYTHON_ONLY = {"logits_processors"}


def sampling(values: dict[str, Any]) -> Change:
    return lambda r: r.sampling_params.CopyFrom(pb.SamplingParams(**values))


def with_unknown_field(message: Any) -> None:
    """Add field number 1000, a varint, as a client of a later contract would."""
    message.MergeFromString(b"\xc0\x3e\x01")


WRONG: list[tuple[str, Change]] = [
    *((f"sampling_params.{field}", sampling(values)) for field, values in WRONG_SAMPLING),
    ("speculation.max_nodes", lambda r: setattr(r.speculation, "max_nodes", 256)),
    ("speculation.max_depth", lambda r: setattr(r.speculation, "max_depth", 256)),
    ("speculation.mode", lambda r: setattr(r.speculation, "mode", 99)),
    ("speculation.drafts", lambda r: r.speculation.drafts.append("nobody")),
    ("speculation.acceptance", lambda r: setattr(r.speculation, "acceptance", "typical")),
    ("input", lambda r: r.ClearField("text")),
    ("text", lambda r: setattr(r, "text", "")),
    ("tokenized.input_ids", lambda r: r.tokenized.input_ids.append(512)),
    ("chat.messages", lambda r: r.chat.SetInParent()),
    ("1000", with_unknown_field),
    ("sampling_params.1000", lambda r: with_unknown_field(r.sampling_params)),
    ("sampling_params.grammar.1000", lambda r: with_unknown_field(r.sampling_params.grammar)),
    ("chat.messages.1000", lambda r: with_unknown_field(r.chat.messages.add(role="user"))),
]


def test_every_parameter_is_tried_with_a_wrong_value() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)} - PYTHON_ONLY
    tried = {field.partition(".")[0] for field, _ in WRONG_SAMPLING}
    assert tried | NEVER_WRONG == names


def violations(running: RunningServer, message: bytes) -> list[tuple[str, str]]:
    """Send a serialised request, expect INVALID_ARGUMENT; returns (field, description) pairs."""
    with grpc.insecure_channel(running.address) as channel:
        call = channel.unary_stream("/specdec.v1.InferenceService/Generate")(message, timeout=20)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    status = rpc_status.from_call(caught.value)
    assert status is not None
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    return [(item.field, item.description) for item in bad_request.field_violations]


@pytest.mark.parametrize(
    ("field", "change"), WRONG, ids=[f"{i}-{field}" for i, (field, _) in enumerate(WRONG)]
)
def test_invalid_argument_names_the_field(
    running: RunningServer, field: str, change: Change
) -> None:
    request = pb.GenerateRequest(text="hello")
    change(request)
    used = running.engine(lambda engine: engine.counters.num_used_pages)
    ((named, description),) = violations(running, request.SerializeToString())
    assert named == field
    assert description
    assert running.engine(lambda engine: engine.counters.num_used_pages) == used


def test_a_message_that_cannot_be_parsed_is_invalid(running: RunningServer) -> None:
    not_utf8 = b"\x1a\x02\xff\xfe"  # field 3, text
    for message in (not_utf8, b"\xff", b"\x1a\x7fabc"):
        ((field, description),) = violations(running, message)
        assert field == "request"
        assert "specdec.v1.GenerateRequest" in description


def test_what_a_status_quotes_is_cut(running: RunningServer) -> None:
    """Trailers of more than 8 KB would turn it into RESOURCE_EXHAUSTED at the client."""
    for letter in ("x", "\U0001f600"):
        schema = f'"{letter * 30_000}"'
        request = pb.GenerateRequest(text="hello")
        request.sampling_params.grammar.json_schema = schema
        ((field, description),) = violations(running, request.SerializeToString())
        assert field == "sampling_params.grammar.json_schema"
        assert description.endswith(" ...")


def test_the_client_raises_what_the_python_api_raises(client: Client) -> None:
    cases: list[tuple[str, tuple[Any, Any, Any]]] = [
        ("prompt", ([1] * 4000, None, None)),
        ("prompt", ("", None, None)),
        ("speculation.drafts", ([1], None, Speculation(drafts=["nobody"]))),
        ("logprobs", ([1], SamplingParams(logprobs=600), None)),
        ("max_tokens", ([1], SamplingParams(max_tokens=2**40), None)),
        ("prompt", ([1.5], None, None)),
        ("prompt", ([-1], None, None)),
        ("prompt", ("\ud800", None, None)),
        ("logits_processors", ([1], SamplingParams(logits_processors=[max]), None)),
        ("grammar.regex", ([1], SamplingParams(grammar=Grammar(regex="(")), None)),
        ("prompt", ([{"role": "user"}], None, None)),
    ]
    for field, arguments in cases:
        with pytest.raises(InvalidRequestError) as caught:
            client.complete(*arguments)
        assert caught.value.field == field


def test_an_id_in_flight_is_refused_and_free_again_afterwards(client: Client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
    with client.generate([1], params, Speculation(mode="off"), request_id="mine") as stream:
        assert next(stream).request_id == "mine"
        with pytest.raises(InvalidRequestError, match="in flight") as caught:
            client.complete([2], request_id="mine")
        assert caught.value.field == "request_id"
    short = SamplingParams(temperature=0.0, max_tokens=3)
    answers = []
    for _ in range(20):  # until the server has noticed the cancellation
        try:
            answers.append(client.complete([2], short, request_id="mine"))
            break
        except InvalidRequestError:
            continue
    assert answers[0].token_ids == client.complete([2], short).token_ids


def test_no_server(client: Client) -> None:
    with Client("127.0.0.1:1") as nobody:
        with pytest.raises(ServerError, match=r"no answer from a server at 127\.0\.0\.1:1") as e:
            nobody.complete([1])
        assert e.value.code is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(ServerError, match="became ready within"):
            nobody.wait_ready(0.2)


def test_wait_ready_returns_at_once(client: Client) -> None:
    client.wait_ready(5)
    assert client.is_ready()


@pytest.mark.parametrize("n", [1, 3])
def test_a_fault_found_while_the_request_runs_names_the_field(
    running: RunningServer, client: Client, llm: Any, n: int
) -> None:
    """Masks that leave no token after the first one: chunks come before the error."""
    params = SamplingParams(allowed_token_ids=[7], bad_words=[[7, 7]], max_tokens=30, n=n)
    with pytest.raises(InvalidRequestError) as expected:
        llm.generate([1, 2], params)
    stream = client.generate([1, 2], params)
    assert next(stream).token_ids == (7,)
    with pytest.raises(InvalidRequestError) as caught:
        list(stream)
    assert (caught.value.field, caught.value.message) == (
        expected.value.field,
        expected.value.message,
    )
    assert not running.engine(lambda engine: engine.has_work)
    assert running.engine(page_check) == 0
