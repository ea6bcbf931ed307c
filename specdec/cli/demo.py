"""`specdec demo`: a server, an answer token by token, and what speculation is worth here."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from specdec.cli import options
from specdec.cli.answer import read_answer
from specdec.cli.comparison import Pair, comparison_table, conclusion, probability_gap
from specdec.cli.serve import LISTENING, READY
from specdec.cli.source import lacks_chat_template
from specdec.errors import InvalidRequestError, SpecdecError
from specdec.model.catalog import DEFAULT_MODEL
from specdec.output import RequestOutput
from specdec.request import SamplingParams, Speculation
from specdec.tokenizer import Prompt

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.rpc.client import Client, GenerateStream

_STOP_SECONDS = 10.0

_FIRST_PROMPT = "What is a prime number? Give three examples."
_WARM_UP_PROMPT = "Name the four seasons, one a line, then name them again in reverse order."
_PROMPTS = {
    "edit code": (
        "Add a docstring to this function and change nothing else:\n\n"
        "def moving_average(values, window):\n"
        "    totals = []\n"
        "    for start in range(len(values) - window + 1):\n"
        "        totals.append(sum(values[start : start + window]) / window)\n"
        "    return totals\n"
    ),
    "correct text": (
        "Correct the spelling and repeat the whole text: The libary opens at nine in the mourning. "
        "Visitors may borow five books for three weeks. The libary is closed on Sunday, and "
        "visitors who return books late pay a small fee for every week."
    ),
    "question": (
        "The Danube rises in the Black Forest and flows for 2,850 kilometres through ten countries "
        "before it reaches the Black Sea. Vienna, Bratislava, Budapest and Belgrade lie on its "
        "banks. Answer in full sentences: where does the Danube rise, how long is it, and which "
        "capitals lie on its banks?"
    ),
    "list": "Write the multiplication table of 7 from 7 x 1 to 7 x 12, one line each.",
    "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
}


def demo(
    model: options.Model = DEFAULT_MODEL,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.", min=2)
    ] = 128,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), bf16 or fp32.")] = "auto",
) -> None:
    """Start a server, stream an answer from it, and compare speculation on and off."""
    from rich.console import Console

    from specdec.rpc.client import Client

    console = Console(highlight=False)
    # Every run starts cold: a prompt must not find its own keys and values in the cache.
    arguments = [model, "--port", "0", "--dtype", dtype, "--no-prefix-cache"]
    with _server(arguments, console) as address, Client(address) as client:
        asker = _Asker(client, max_tokens)
        console.print(f"\n{_FIRST_PROMPT}", style="bold")
        answer, interrupted = read_answer(asker.stream(_FIRST_PROMPT), echo=True)
        console.print(answer.summary(), style="dim", soft_wrap=True)
        if interrupted:
            raise typer.Exit(130)
        pairs = _compare(asker)
    console.print()
    console.print(comparison_table(pairs))
    console.print(conclusion(pairs), soft_wrap=True)


@contextmanager
def _server(arguments: list[str], console: Console) -> Iterator[str]:
    """Run `specdec serve` as a process of its own and yield its address.

    A server that ends before it is ready has said why on stderr, and ends this command likewise.
    """
    command = [sys.executable, "-m", "specdec", "serve", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = ""
        for line in process.stdout:
            console.print(f"server: {line.rstrip()}", style="dim", markup=False, soft_wrap=True)
            if found := re.match(rf"{LISTENING}(\S+:\d+)", line):
                address = found[1]
            if line.startswith(READY):
                break
        else:
            _raise_for(process.wait())
        yield address
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _raise_for(status: int) -> NoReturn:
    if status > 0:
        raise typer.Exit(status)
    raise SpecdecError(f"the server ended with status {status} before it was ready")


class _Asker:
    """Asks greedy questions, through the chat template if the server's model has one."""

    def __init__(self, client: Client, max_tokens: int) -> None:
        self._client = client
        self._params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self._has_template = True
        try:
            self.complete(_WARM_UP_PROMPT, mode="auto")
        except InvalidRequestError as error:
            if not lacks_chat_template(error):
                raise
            self._has_template = False
            self.complete(_WARM_UP_PROMPT, mode="auto")

    def stream(self, text: str) -> GenerateStream:
        return self._client.generate(self._prompt(text), self._params)

    def complete(self, text: str, mode: str) -> RequestOutput:
        return self._client.complete(self._prompt(text), self._params, Speculation(mode=mode))

    def with_logprobs(self, text: str, max_tokens: int) -> RequestOutput:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=5)
        return self._client.complete(self._prompt(text), params, Speculation(mode="off"))

    def _prompt(self, text: str) -> Prompt:
        return [{"role": "user", "content": text}] if self._has_template else text


def _compare(asker: _Asker) -> list[Pair]:
    """Ask everything with and without speculation, taking turns at going first."""
    from rich.console import Console
    from rich.progress import track

    pairs = []
    errors = Console(stderr=True)
    questions = track(
        _PROMPTS.items(),
        "comparing",
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
    for index, (name, text) in enumerate(questions):
        modes = ["off", "auto"] if index % 2 == 0 else ["auto", "off"]
        outputs = {mode: asker.complete(text, mode) for mode in modes}
        off, on = outputs["off"], outputs["auto"]
        gap = probability_gap(off, on, partial(asker.with_logprobs, text))
        pairs.append(Pair(name, off, on, gap))
    return pairs
