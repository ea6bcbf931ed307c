"""A tiny random model through the engine and through a server, to see that both work here."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from specdec.errors import SpecdecError
from specdec.request import SamplingParams, Speculation

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec.output import RequestOutput

_PROMPT = "the time of the day " * 4
_PARAMS = SamplingParams(temperature=0.0, max_tokens=32)
_SERVER_SECONDS = 60.0


def generate_both_ways() -> str:
    """Generate with and without speculation; says what came of it.

    Raises SpecdecError if the answers differ.
    """
    import specdec.llm  # noqa: F401  (seconds, which say nothing about the engine)

    begin = time.monotonic()
    llm = _tiny_llm()
    plain, speculative = (
        llm.generate(_PROMPT, _PARAMS, speculation=Speculation(mode=mode))[0]
        for mode in ("off", "fixed")
    )
    if plain.token_ids != speculative.token_ids:
        raise SpecdecError("a tiny model says something else with speculation than without")
    seconds = time.monotonic() - begin
    return (
        f"{len(plain.token_ids)} tokens of a tiny model, the same with and without speculation, "
        f"{seconds:.1f} s"
    )


def serve_once() -> str:
    """Answer one request over gRPC on a free loopback port; says what came of it."""
    begin = time.monotonic()
    address, answer = asyncio.run(_ask_server())
    seconds = time.monotonic() - begin
    return f"{len(answer.token_ids)} tokens over gRPC from {address}, {seconds:.1f} s"


async def _ask_server() -> tuple[str, RequestOutput]:
    from specdec.rpc.client import Client
    from specdec.rpc.server import Server

    server = Server(lambda: _tiny_llm().engine, port=0)
    await server.start()
    try:
        await server.load()
        with Client(server.address) as client:
            answer = await asyncio.to_thread(
                client.complete, _PROMPT, _PARAMS, timeout=_SERVER_SECONDS
            )
    finally:
        await server.stop(0)
    return server.address, answer


def _tiny_llm() -> LLM:
    from specdec.llm import LLM
    from specdec.testing import tiny_llama, tiny_tokenizer

    return LLM(tiny_llama(), tiny_tokenizer(), num_pages=32)
