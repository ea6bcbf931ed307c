"""A typed client: the same parameters and records as the Python API, over the wire."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.output import RequestDelta, RequestOutput, TokenLogprobs
from specdec.request import SamplingParams, Speculation
from specdec.rpc import convert
from specdec.rpc.errors import ServerError, error_of
from specdec.tokenizer import Prompt
from specdec.v1 import inference_pb2 as pb
from specdec.v1 import inference_pb2_grpc as pb_grpc

_SERVICE = "specdec.v1.InferenceService"
_POLL_SECONDS = 0.1
_OPTIONS = [("grpc.max_receive_message_length", 64 * 2**20)]


class GenerateStream(Iterator[RequestDelta]):
    """The answers to one prompt while they arrive: iterate for their deltas.

    With n > 1 the deltas of different answers interleave; `index` tells them apart. The last one of
    each answer has the finish reason and the full statistics; those before carry running counts.
    Ends without these after `cancel`. Raises InvalidRequestError or ServerError.

    seed, prompt_token_ids: of answer 0, known once its last delta has been read.
    seeds: index to seed, of each answer whose last delta has been read.
    """

    def __init__(self, call: Any, address: str) -> None:
        self.seed = 0
        self.seeds: dict[int, int] = {}
        self.prompt_token_ids: tuple[int, ...] = ()
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._call = call
        self._address = address
        self._cancelled = False

    def __next__(self) -> RequestDelta:
        while True:
            response = self._receive()
            if response.WhichOneof("response") == "complete":
                complete = response.complete
                self.seeds[complete.index] = complete.seed
                if complete.index == 0:
                    self.seed = complete.seed
                    self.prompt_token_ids = tuple(complete.prompt_token_ids)
                delta = convert.delta_of_complete(response.request_id, complete)
                return self._with_prompt_logprobs(delta)
            delta = convert.delta_of_chunk(response.request_id, response.chunk)
            self._prompt_logprobs += delta.prompt_logprobs or ()
            if delta.token_ids or delta.text:
                return self._with_prompt_logprobs(delta)

    def _receive(self) -> pb.GenerateResponse:
        try:
            response: pb.GenerateResponse = next(self._call)
        except grpc.RpcError as error:
            if self._cancelled:
                raise StopIteration from None
            raise error_of(error, self._address) from None
        return response

    def _with_prompt_logprobs(self, delta: RequestDelta) -> RequestDelta:
        """The same; answer 0's first one with what has come for the prompt, maybe in parts."""
        if delta.index != 0 or not self._prompt_logprobs:
            return delta
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return dataclasses.replace(delta, prompt_logprobs=prompt_logprobs)

    def cancel(self) -> None:
        """End the request now; the server frees what it holds. Idempotent."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> GenerateStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class Client:
    """A connection to a specdec server; safe to use from several threads.

    address: host:port.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub: Any = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
    ) -> GenerateStream:
        """Start a request and stream its answers.

        prompt: text, token ids or chat messages. timeout: seconds until the call is ended with
        DEADLINE_EXCEEDED. Fields that are not given are the server's defaults.
        Raises InvalidRequestError for what cannot be sent, such as logits_processors.
        """
        message = convert.request_to_wire(
            prompt, params, speculation, request_id=request_id, return_prompt_token_ids=True
        )
        return GenerateStream(self._stub.Generate(message, timeout=timeout), self.address)

    def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
    ) -> RequestOutput:
        """The whole answer at once, its siblings with it; arguments as for `generate`."""
        stream = self.generate(prompt, params, speculation, request_id=request_id, timeout=timeout)
        with stream:
            return collect_output(stream, params or SamplingParams())

    def is_ready(self, timeout: float = 1.0) -> bool:
        """Whether the server is there, loaded and warm."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        try:
            status = self._health.Check(request, timeout=timeout, wait_for_ready=True).status
        except grpc.RpcError:
            return False
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the server is ready. Raises ServerError after timeout seconds."""
        deadline = time.monotonic() + timeout
        while not self.is_ready(timeout=max(0.1, min(1.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise ServerError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"no server at {self.address} became ready within {timeout:g} s",
                )
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close the connection; running requests are cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def collect_output(stream: GenerateStream, params: SamplingParams) -> RequestOutput:
    """Read a stream to its end and put its answers together: answer 0, with its siblings."""
    answers: list[list[RequestDelta]] = [[] for _ in range(params.n)]
    for delta in stream:
        answers[delta.index].append(delta)
    first, *siblings = [_joined(stream, deltas, params) for deltas in answers]
    return dataclasses.replace(first, siblings=tuple(siblings))


def _joined(
    stream: GenerateStream, deltas: Sequence[RequestDelta], params: SamplingParams
) -> RequestOutput:
    last = deltas[-1] if deltas else None
    if last is None or last.finish_reason is None:
        raise ServerError(grpc.StatusCode.INTERNAL, "the call ended without a complete message")
    logprobs = None
    if params.logprobs is not None:
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
    return RequestOutput(
        request_id=last.request_id,
        prompt_token_ids=stream.prompt_token_ids,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
        seed=stream.seeds[last.index],
        stats=last.stats,
        prompt_logprobs=deltas[0].prompt_logprobs,
        index=last.index,
    )
