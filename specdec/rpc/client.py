"""A typed client: the same parameters and records as the Python API, over the wire."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.output import RequestDelta, RequestOutput
from specdec.request import SamplingParams, Speculation
from specdec.rpc import convert
from specdec.rpc.errors import ServerError, error_of
from specdec.tokenizer import Prompt
from specdec.v1 import inference_pb2_grpc as pb_grpc

_SERVICE = "specdec.v1.InferenceService"
_POLL_SECONDS = 0.1
_OPTIONS = [("grpc.max_receive_message_length", 64 * 2**20)]


class GenerateStream(Iterator[RequestDelta]):
    """One answer while it arrives: iterate for its deltas.

    The last delta has the finish reason and the full statistics; those before carry running counts.
    Ends without a last delta after `cancel`. Raises InvalidRequestError or ServerError.

    seed, prompt_token_ids: known once the last delta has been read.
    """

    def __init__(self, call: Any, address: str) -> None:
        self.seed = 0
        self.prompt_token_ids: tuple[int, ...] = ()
        self._call = call
        self._address = address
        self._cancelled = False

    def __next__(self) -> RequestDelta:
        try:
            response = next(self._call)
        except grpc.RpcError as error:
            if self._cancelled:
                raise StopIteration from None
            raise error_of(error, self._address) from None
        if response.WhichOneof("response") == "chunk":
            return convert.delta_of_chunk(response.request_id, response.chunk)
        self.seed = response.complete.seed
        self.prompt_token_ids = tuple(response.complete.prompt_token_ids)
        return convert.delta_of_complete(response.request_id, response.complete)

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
        """Start a request and stream its answer.

        prompt: text, token ids or chat messages. timeout: seconds until the call is ended with
        DEADLINE_EXCEEDED. Fields that are not given are the server's defaults.
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
        """The whole answer at once; arguments as for `generate`."""
        stream = self.generate(prompt, params, speculation, request_id=request_id, timeout=timeout)
        with stream:
            return join_deltas(stream, wants_logprobs=bool(params and params.logprobs is not None))

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


def join_deltas(stream: GenerateStream, *, wants_logprobs: bool) -> RequestOutput:
    """Read a stream to its end and put the answer together."""
    deltas = list(stream)
    last = deltas[-1] if deltas else None
    if last is None or last.finish_reason is None:
        raise ServerError(grpc.StatusCode.INTERNAL, "the call ended without a complete message")
    return RequestOutput(
        request_id=last.request_id,
        prompt_token_ids=stream.prompt_token_ids,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(e for delta in deltas for e in delta.logprobs) if wants_logprobs else None,
        seed=stream.seed,
        stats=last.stats,
    )
