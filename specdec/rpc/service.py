"""specdec.v1.InferenceService on top of an engine thread."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext
from grpc_status import rpc_status

from specdec.errors import InvalidRequestError, SpecdecError
from specdec.rpc import convert
from specdec.rpc.bridge import EngineThread
from specdec.rpc.errors import status_of
from specdec.rpc.outbox import RequestStream, split_delta
from specdec.rpc.params import sampling_params_of, speculation_of
from specdec.v1 import inference_pb2 as pb

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

logger = logging.getLogger(__name__)


class InferenceService:
    """Answers Generate calls. A call that ends early, however it ends, aborts its request."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._running: set[asyncio.Task[None]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server.

        The generated registration would answer UNKNOWN to a message that cannot be parsed, for
        example one with text that is not UTF-8; here it reaches `Generate` as it is.
        """
        generate = grpc.unary_stream_rpc_method_handler(
            self.Generate, response_serializer=pb.GenerateResponse.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Generate": generate})
        server.add_generic_rpc_handlers((handler,))

    async def Generate(self, message: bytes, context: ServicerContext) -> None:
        """Stream the answers to a serialised GenerateRequest (see the proto file)."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        request = pb.GenerateRequest()
        try:
            _parse(message, request)
            await self._generate(request, context)
        except grpc.aio.BaseError:
            # Writing failed: the client is gone. (One that goes while nothing is being written
            # cancels this task instead.)
            logger.debug("client of %r is gone", request.request_id)
        except InvalidRequestError as error:
            await _abort(context, convert.wire_field(error, request))
        except Exception as error:
            if not isinstance(error, SpecdecError):
                logger.exception("request %r failed", request.request_id)
            await _abort(context, error)
        finally:
            self._running.discard(task)

    async def drained(self, timeout: float) -> None:
        """Wait until no call runs any more, timeout seconds at most."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    async def _generate(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        convert.refuse_unknown_fields(request)
        speculation = None
        if request.HasField("speculation"):
            speculation = speculation_of(request.speculation, self._engine.speculation)
        stream = await self._engine.submit(
            request.request_id or uuid.uuid4().hex,
            convert.prompt_of(request),
            sampling_params_of(request.sampling_params),
            speculation,
        )
        try:
            await _write_answers(stream, context, request.return_prompt_token_ids)
        finally:
            stream.close()


def _parse(message: bytes, request: pb.GenerateRequest) -> None:
    try:
        request.ParseFromString(message)
    except DecodeError as error:
        name = pb.GenerateRequest.DESCRIPTOR.full_name
        raise InvalidRequestError("request", f"is no {name}: {error}") from error


async def _write_answers(
    stream: RequestStream, context: ServicerContext, echo_prompt: bool
) -> None:
    num_tokens: Counter[int] = Counter()

    async def write(**response: Any) -> None:
        await context.write(pb.GenerateResponse(request_id=stream.request_id, **response))

    async for delta in stream:
        for part in split_delta(delta):
            num_tokens[delta.index] += len(part.token_ids)
            if part.token_ids or part.text or part.prompt_logprobs:
                total = num_tokens[delta.index]
                await write(chunk=convert.chunk_to_wire(part, total, stream.prompt_token_ids))
        if delta.finish_reason is not None:
            prompt = stream.prompt_token_ids if echo_prompt and delta.index == 0 else ()
            seed = stream.seeds[delta.index]
            await write(complete=convert.complete_to_wire(delta, seed, prompt))


async def _abort(context: ServicerContext, error: Exception) -> None:
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
