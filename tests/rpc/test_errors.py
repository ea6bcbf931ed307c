"""A wrong request is refused with the field's name, before it takes a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specdec.errors import InvalidRequestError
from specdec.request import SamplingParams, Speculation
from specdec.rpc.client import Client
from specdec.rpc.errors import ServerError
from specdec.v1 import inference_pb2 as pb
from specdec.v1 import inference_pb2_grpc as pb_grpc
from tests.rpc.running import RunningServer

Change = Callable[[pb.GenerateRequest], Any]

WRONG: dict[str, Change] = {
    "sampling_params.temperature": lambda r: setattr(r.sampling_params, "temperature", -1.0),
    "sampling_params.top_p": lambda r: setattr(r.sampling_params, "top_p", 0.0),
    "sampling_params.top_k": lambda r: setattr(r.sampling_params, "top_k", -2),
    "sampling_params.min_p": lambda r: setattr(r.sampling_params, "min_p", float("nan")),
    "sampling_params.max_tokens": lambda r: setattr(r.sampling_params, "max_tokens", 0),
    "sampling_params.stop": lambda r: r.sampling_params.stop.append(""),
    "sampling_params.logprobs": lambda r: setattr(r.sampling_params, "logprobs", 2**31),
    "speculation.max_nodes": lambda r: setattr(r.speculation, "max_nodes", 256),
    "speculation.max_depth": lambda r: setattr(r.speculation, "max_depth", 256),
    "speculation.mode": lambda r: setattr(r.speculation, "mode", 99),
    "speculation.drafts": lambda r: r.speculation.drafts.append("nobody"),
    "speculation.acceptance": lambda r: setattr(r.speculation, "acceptance", "typical"),
    "input": lambda r: r.ClearField("text"),
    "text": lambda r: setattr(r, "text", ""),
    "tokenized.input_ids": lambda r: r.tokenized.input_ids.append(512),
    "chat.messages": lambda r: r.chat.SetInParent(),
}


@pytest.mark.parametrize("field", WRONG)
def test_invalid_argument_names_the_field(running: RunningServer, field: str) -> None:
    request = pb.GenerateRequest(text="hello")
    WRONG[field](request)
    used = running.engine(lambda engine: engine.counters.num_used_pages)
    with grpc.insecure_channel(running.address) as channel:
        call = pb_grpc.InferenceServiceStub(channel).Generate(request)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    assert status is not None
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    violations = [violation.field for violation in bad_request.field_violations]
    assert violations == [field]
    assert bad_request.field_violations[0].description
    assert running.engine(lambda engine: engine.counters.num_used_pages) == used


def test_the_client_raises_what_the_python_api_raises(client: Client) -> None:
    cases = [
        ("prompt", ([1] * 4000, None, None)),
        ("prompt", ("", None, None)),
        ("speculation.drafts", ([1], None, Speculation(drafts=["nobody"]))),
        ("logprobs", ([1], SamplingParams(logprobs=600), None)),
        ("max_tokens", ([1], SamplingParams(max_tokens=2**40), None)),
        ("prompt", ([1.5], None, None)),
        ("prompt", ([-1], None, None)),
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
