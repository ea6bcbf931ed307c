"""The generated code is fresh, and the messages have every field of the Python API."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.request import SamplingParams, Speculation, SpeculationMode
from specdec.rpc import convert
from specdec.v1 import inference_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]


def test_generated_code_is_fresh() -> None:
    pytest.importorskip("grpc_tools")
    command = [sys.executable, str(ROOT / "proto" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("message", "record"), [(pb.SamplingParams, SamplingParams), (pb.Speculation, Speculation)]
)
def test_messages_have_every_field(message: type, record: type) -> None:
    on_wire = {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]
    assert on_wire == {field.name for field in dataclasses.fields(record)}


def test_sampling_params_survive_the_wire() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_k=0,
        top_p=0.95,
        min_p=0.0,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.3,
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[0, 7],
        ignore_eos=True,
        max_tokens=1,
        logprobs=0,
    )
    message = convert.request_to_wire("x", params).sampling_params
    assert convert.sampling_params_of(message) == params


def test_unset_fields_stay_unset() -> None:
    assert convert.sampling_params_of(pb.SamplingParams()) == SamplingParams()
    message = convert.request_to_wire("x", SamplingParams()).sampling_params
    assert convert.sampling_params_of(message) == SamplingParams()
    zero = pb.SamplingParams(temperature=0.0, seed=0, logprobs=0)
    params = convert.sampling_params_of(zero)
    assert (params.temperature, params.seed, params.logprobs) == (0.0, 0, 0)


def test_speculation_survives_the_wire_and_fills_in_defaults() -> None:
    speculation = Speculation(mode="fixed", max_nodes=0, max_depth=3, drafts=["ngram"])
    message = convert.request_to_wire("x", None, speculation).speculation
    assert convert.speculation_of(message, Speculation(mode="off", max_nodes=9)) == speculation
    partial = pb.Speculation(mode=pb.SPECULATION_MODE_OFF)
    defaults = Speculation(mode="auto", max_nodes=9, max_depth=4)
    expected = dataclasses.replace(defaults, mode=SpeculationMode.OFF)
    assert convert.speculation_of(partial, defaults) == expected
