"""`specdec serve`: the gRPC server in the foreground."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli import options
from specdec.cli.groups import spread
from specdec.model.catalog import DEFAULT_MODEL
from specdec.request import SpeculationMode

if TYPE_CHECKING:
    from specdec.engine import Engine
    from specdec.llm import LLM
    from specdec.rpc.server import Server

LISTENING = "listening on "
READY = "ready in "
"""What two lines on stdout begin with, for programs that start a server with --port 0: the first
goes on with the address, the second comes once requests are taken."""


@spread
def serve(
    model: options.Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 lets the system choose.", min=0, max=65535)] = 50051,
    grace: Annotated[
        float, typer.Option(help="Seconds that running requests get when stopping.", min=0)
    ] = 5.0,
    reflection: Annotated[bool, typer.Option(help="Offer gRPC server reflection.")] = True,
    *,
    speculation: options.SpeculationOptions,
    engine: options.ServerEngine,
) -> None:
    """Serve a model over gRPC until SIGTERM or Ctrl-C."""
    import asyncio

    from specdec.rpc.server import Server

    default_speculation = speculation.speculation()
    banner = _Banner(model, engine.draft or [options.DEFAULT_DRAFT], grace)

    def create_engine() -> Engine:
        llm = options.load_llm(model, engine, default_speculation)
        banner.describe(llm)
        return llm.engine

    def create_server() -> Server:
        return Server(create_engine, host=host, port=port, reflection_enabled=reflection)

    asyncio.run(_run(create_server, banner, grace))


async def _run(create_server: Callable[[], Server], banner: _Banner, grace: float) -> None:
    from specdec.rpc.server import run_server

    server = create_server()
    await run_server(
        server,
        grace=grace,
        on_listening=banner.listening,
        on_ready=banner.ready,
        on_stopping=banner.stopping,
    )
    if server.engine.is_loading:
        # The thread that loads cannot be stopped, and one that outlives the interpreter's
        # shutdown inside native code takes the process down with a signal.
        sys.stdout.flush()
        os._exit(0)


class _Banner:
    """What the server tells the person who started it, on stdout."""

    def __init__(self, model: str, drafts: list[str], grace: float) -> None:
        self._model = model
        self._drafts = drafts
        self._grace = grace
        self._started = time.monotonic()
        self._lines: list[str] = []

    def describe(self, llm: LLM) -> None:
        """Note what to say about an engine; called on its thread."""
        engine = llm.engine
        speculation = engine.config.speculation
        mode = SpeculationMode(speculation.mode).value
        self._lines = [
            f"model  {llm.model_source}",
            f"draft  {', '.join(self._drafts)}; speculation {mode}, up to {speculation.max_nodes} "
            f"nodes of depth {speculation.max_depth}",
            f"pages  {engine.counters.num_pages} of {engine.config.page_size} tokens; "
            f"up to {engine.max_model_len} tokens a request, "
            f"{engine.config.max_num_seqs} requests at once",
        ]

    def listening(self, server: Server) -> None:
        _say(f"{LISTENING}{server.address}, loading {self._model}")

    def ready(self, server: Server) -> None:
        for line in self._lines:
            _say(f"  {line}")
        _say(f"{READY}{time.monotonic() - self._started:.1f} s")

    def stopping(self, server: Server) -> None:
        _say(f"stopping: running requests get {self._grace:g} s")


def _say(line: str) -> None:
    print(line, flush=True)
