"""specdec.v1.InferenceService on top of an engine thread."""

from __future__ import annotations

import asyncio
import logging
import uuid

import grpc
from grpc.aio import ServicerContext
from grpc_status import rpc_status

from specdec.errors import InvalidRequestError, SpecdecError
from specdec.rpc import convert
from specdec.rpc.bridge import EngineThread
from specdec.rpc.errors import status_of
from specdec.rpc.outbox import RequestStream
from specdec.v1 import inference_pb2 as pb
from specdec.v1 import inference_pb2_grpc as pb_grpc

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

logger = logging.getLogger(__name__)


class InferenceService(pb_grpc.InferenceServiceServicer):
    """Answers Generate calls. A call that ends early, however it ends, aborts its request."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._running: set[asyncio.Task[None]] = set()

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> None:
        """Stream one answer (see the proto file)."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
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
        speculation = None
        if request.HasField("speculation"):
            speculation = convert.speculation_of(request.speculation, self._engine.speculation)
        stream = await self._engine.submit(
            request.request_id or uuid.uuid4().hex,
            convert.prompt_of(request),
            convert.sampling_params_of(request.sampling_params),
            speculation,
        )
        try:
            await _write_answer(stream, context, request.return_prompt_token_ids)
        finally:
            stream.close()


async def _write_answer(stream: RequestStream, context: ServicerContext, echo_prompt: bool) -> None:
    num_tokens = 0
    async for delta in stream:
        num_tokens += len(delta.token_ids)
        if delta.token_ids or delta.text:
            chunk = convert.chunk_to_wire(delta, num_tokens)
            await context.write(pb.GenerateResponse(request_id=stream.request_id, chunk=chunk))
        if delta.finish_reason is not None:
            prompt = stream.prompt_token_ids if echo_prompt else ()
            complete = convert.complete_to_wire(delta, stream.seed, prompt)
            await context.write(
                pb.GenerateResponse(request_id=stream.request_id, complete=complete)
            )


async def _abort(context: ServicerContext, error: Exception) -> None:
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
