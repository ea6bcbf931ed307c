"""Where answers come from: a model in this process, or a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import typer

from specdec.cli import options
from specdec.errors import InvalidRequestError, ModelError, SpecdecError
from specdec.model.catalog import DEFAULT_MODEL
from specdec.output import RequestDelta
from specdec.request import SamplingParams, Speculation
from specdec.tokenizer import Prompt

if TYPE_CHECKING:
    from specdec.llm import LLM


class AnswerStream(Protocol):
    """A running request: the gRPC client's GenerateStream, or LocalStream.

    seeds: index of an answer to its seed; complete once the stream has ended.
    """

    @property
    def seeds(self) -> dict[int, int]: ...

    def __iter__(self) -> Iterator[RequestDelta]: ...

    def cancel(self) -> None: ...


class Source(Protocol):
    """What answers requests: the gRPC Client, or LocalSource."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
    ) -> AnswerStream: ...


class LocalSource:
    """A model in this process; one request at a time."""

    def __init__(self, llm: LLM) -> None:
        tokenizer = llm.engine.tokenizer
        if tokenizer is None:
            raise ModelError(f"{llm.model_source} has no tokenizer, so it cannot read a prompt")
        self._tokenizer = tokenizer
        self._llm = llm

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can read messages."""
        return bool(self._tokenizer.hf.chat_template)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
    ) -> LocalStream:
        """Start a request. Raises InvalidRequestError."""
        return LocalStream(
            self._llm,
            self._tokenizer.prompt_token_ids(prompt),
            params or SamplingParams(),
            speculation,
        )


class LocalStream(Iterator[RequestDelta]):
    """One request on an engine of this process, stepped by iterating.

    Raises InvalidRequestError or SpecdecError, after which nothing of the request is left.
    """

    def __init__(
        self,
        llm: LLM,
        prompt_token_ids: list[int],
        params: SamplingParams,
        speculation: Speculation | None,
    ) -> None:
        self._engine = llm.engine
        request = self._engine.add_request("cli", prompt_token_ids, params, speculation)
        self.seeds = {item.index: item.seed for item in [request, *request.siblings]}
        self._id = request.request_id
        self._deltas: deque[RequestDelta] = deque()
        self._cancelled = False

    def __next__(self) -> RequestDelta:
        while not self._deltas:
            if not self._engine.has_work:
                raise StopIteration
            step = self._engine.abort(self._id) if self._cancelled else self._engine.step()
            self._deltas.extend(step)
        delta = self._deltas.popleft()
        if delta.error is not None:
            self._engine.abort(self._id)
            self._deltas.clear()
            if delta.error_field is not None:
                raise InvalidRequestError(delta.error_field, delta.error)
            raise SpecdecError(delta.error)
        return delta

    def cancel(self) -> None:
        """End the request after the running step; its last deltas still come."""
        self._cancelled = True


@contextmanager
def opened(model: str | None, server: str | None, engine: options.Engine) -> Iterator[Source]:
    """The server, or the model loaded into this process (the default one if none is named).

    Raises typer.BadParameter for a server together with what only a model can be given.
    """
    if server is None:
        yield LocalSource(options.load_llm(model or DEFAULT_MODEL, engine, None))
        return
    if model is not None:
        raise typer.BadParameter("a server has its model: give MODEL or --server, not both")
    engine.refuse_given()
    from specdec.rpc.client import Client

    with Client(server) as client:
        yield client


def lacks_chat_template(error: InvalidRequestError) -> bool:
    """Whether a chat was refused because the model has no template for it."""
    return error.field == "prompt" and "no chat template" in error.message
