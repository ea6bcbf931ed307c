"""The two ways in, behind one interface: the offline API and a gRPC server in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from specdec import LLM, SamplingParams, Speculation
from specdec.output import RequestOutput
from specdec.rpc.client import Client
from tests.rpc.running import RunningServer

T = TypeVar("T")
OFF = Speculation(mode="off")


@dataclass(frozen=True)
class Answer:
    """A whole answer and the pieces in which it came: (text, number of ids, of logprobs) each.

    The offline API hands out no pieces: there is one.
    """

    output: RequestOutput
    chunks: list[tuple[str, int, int]]

    @property
    def ids(self) -> list[int]:
        return list(self.output.token_ids)


class Entry:
    """A started engine. ask answers all prompts at once, in order; one parameter for all, or one
    a prompt.
    """

    def ask(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        speculation: Speculation = OFF,
    ) -> list[Answer]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        return self._ask(prompts, each, speculation)

    def ask_one(
        self, prompt: Any, params: SamplingParams, speculation: Speculation = OFF
    ) -> Answer:
        return self.ask([prompt], params, speculation)[0]

    def engine(self, function: Callable[[Any], T]) -> T:
        """function(engine), where the engine may be touched."""
        raise NotImplementedError

    def _ask(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], speculation: Speculation
    ) -> list[Answer]:
        raise NotImplementedError


class OfflineEntry(Entry):
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def _ask(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], speculation: Speculation
    ) -> list[Answer]:
        outputs = self._llm.generate(list(prompts), params, speculation=speculation)
        return [
            Answer(o, [(o.text, len(o.token_ids), len(o.logprobs or ()))]) for o in outputs
        ]  # fmt: skip

    def engine(self, function: Callable[[Any], T]) -> T:
        return function(self._llm.engine)


class GenerateEntry(Entry):
    def __init__(self, running: RunningServer, client: Client) -> None:
        self.client = client
        self._running = running

    def _ask(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], speculation: Speculation
    ) -> list[Answer]:
        def read(index: int) -> Answer:
            stream = self.client.generate(prompts[index], params[index], speculation, timeout=900)
            deltas = list(stream)
            last = deltas[-1]
            assert last.finish_reason is not None
            logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
            output = RequestOutput(
                last.request_id,
                stream.prompt_token_ids,
                tuple(token for delta in deltas for token in delta.token_ids),
                "".join(delta.text for delta in deltas),
                last.finish_reason,
                last.stop_reason,
                logprobs if params[index].logprobs is not None else None,
                stream.seed,
                last.stats,
            )
            return Answer(output, [(d.text, len(d.token_ids), len(d.logprobs)) for d in deltas])

        with ThreadPoolExecutor(min(16, len(prompts))) as pool:
            return list(pool.map(read, range(len(prompts))))

    def engine(self, function: Callable[[Any], T]) -> T:
        return self._running.engine(function)


class Starter:
    """Starts engines behind one kind of entry; all end with the test."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.kind = kind
        self._stack = stack

    def __call__(self, model: Any, tokenizer: Any = None, **fields: Any) -> Entry:
        """Arguments as for LLM; 256 pages and the model's own law unless told otherwise."""
        fields = {"num_pages": 256, "generation_config": "none", **fields}
        if self.kind == "LLM":
            return OfflineEntry(LLM(model, tokenizer, **fields))
        running = RunningServer(lambda: LLM(model, tokenizer, **fields).engine)
        self._stack.enter_context(running)
        return GenerateEntry(running, self._stack.enter_context(Client(running.address)))
