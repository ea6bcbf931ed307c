"""Whatever a client sends, the answer is tokens or INVALID_ARGUMENT, and no page is lost."""

from __future__ import annotations

import math
import random
from typing import Any

import grpc
import pytest

from specdec.testing import page_check
from specdec.v1 import inference_pb2 as pb
from tests.rpc.running import RunningServer

FLOATS = [0.0, 1.0, -1.0, 0.5, 100.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf]
UNSIGNED = [0, 1, 2, 5, 128, 129, 511, 512, 2**31 - 1, 2**32 - 1]
SIGNED = [-(2**31), -2, -1, *UNSIGNED[:-1]]
TEXTS = [
    "", "a", "th", "\0", "\U0001f600", " ", "</s>", "yes", "a*", "(", "(a|b)*c", "a{100000}",
    "[^\\x00-\\xff]", "\\p{L}+", 'root ::= "a"', "root ::= root", 'start: "a"', 'start: ""',
    "%import common.WS", "{}", "[1]", '{"type": "object"}', '{"enum": []}', '{"$ref": "#/x"}',
    '{"const": "\\ud800"}', '{"type": "string", "pattern": "("}', "x" * 3000,
]  # fmt: skip


class Sender:
    """Draws requests from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def request(self) -> bytes:
        """A serialised request with hostile values in some fields; one in four is damaged."""
        request = pb.GenerateRequest(text="hello there")
        self._fill(request.sampling_params, self._rng.choice([0.03, 0.1, 0.2]))
        if self._rng.random() < 0.3:
            self._fill(request, 0.3)
        if not request.sampling_params.HasField("max_tokens"):
            request.sampling_params.max_tokens = 4
        data = bytearray(request.SerializeToString())
        if self._rng.random() < 0.25:
            for _ in range(self._rng.randint(1, 3)):
                position = self._rng.randrange(len(data))
                data[position : position + self._rng.randrange(2)] = self._rng.randbytes(1)
        return bytes(data)

    def _fill(self, message: Any, share: float) -> None:
        """Set about this share of the fields."""
        for field in message.DESCRIPTOR.fields:
            if self._rng.random() > share:
                continue
            if not field.is_repeated and field.message_type is None:
                setattr(message, field.name, self._value(field))
            elif not field.is_repeated:
                getattr(message, field.name).SetInParent()
                self._fill(getattr(message, field.name), 0.5)
            elif field.message_type is None:
                values = [self._value(field) for _ in range(self._rng.randrange(4))]
                getattr(message, field.name).extend(values)
            elif field.message_type.GetOptions().map_entry:
                token = self._rng.choice(UNSIGNED)
                getattr(message, field.name)[token] = self._rng.choice(FLOATS)
            else:
                for _ in range(self._rng.randrange(3)):
                    self._fill(getattr(message, field.name).add(), 0.9)

    def _value(self, field: Any) -> Any:
        values: dict[int, list[Any]] = {
            field.TYPE_DOUBLE: FLOATS,
            field.TYPE_INT32: SIGNED,
            field.TYPE_UINT32: UNSIGNED,
            field.TYPE_UINT64: [*UNSIGNED, 2**64 - 1],
            field.TYPE_BOOL: [False, True],
            field.TYPE_STRING: TEXTS,
            field.TYPE_ENUM: [-1, 0, 1, 2, 3, 99],
        }
        return self._rng.choice(values[field.type])


def outcome(call: Any) -> grpc.StatusCode:
    """The status of a call, cancelled once a few messages have come."""
    try:
        for count, _ in enumerate(call):
            if count == 6:
                call.cancel()
                break
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("seed", range(4))
def test_no_request_ends_in_internal_or_unknown(running: RunningServer, seed: int) -> None:
    sender = Sender(seed)
    codes = []
    with grpc.insecure_channel(running.address) as channel:
        generate = channel.unary_stream("/specdec.v1.InferenceService/Generate")
        for _ in range(60):
            message = sender.request()
            codes.append(outcome(generate(message, timeout=20)))
            assert codes[-1] in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), message
    assert len(set(codes)) == 2, "requests of both kinds must be among them"
    running.engine(page_check)
