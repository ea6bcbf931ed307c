"""`specdec demo`: a server, an answer token by token, and what speculation is worth here."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from specdec.cli.answer import read_answer
from specdec.cli.serve import LISTENING, READY
from specdec.errors import InvalidRequestError, SpecdecError
from specdec.model.catalog import DEFAULT_MODEL
from specdec.output import RequestOutput
from specdec.request import SamplingParams, Speculation
from specdec.tokenizer import Prompt

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from specdec.rpc.client import Client, GenerateStream

_FP32_NAMES = {"fp32", "float32"}
_STOP_SECONDS = 10.0

_TITLE = "tokens/s with speculation off and on: same greedy requests, same server"
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
    "question on a text": (
        "The Danube rises in the Black Forest and flows for 2,850 kilometres through ten countries "
        "before it reaches the Black Sea. Vienna, Bratislava, Budapest and Belgrade lie on its "
        "banks. Answer in full sentences: where does the Danube rise, how long is it, and which "
        "capitals lie on its banks?"
    ),
    "list": "Write the multiplication table of 7 from 7 x 1 to 7 x 12, one line each.",
    "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
}


@dataclass(frozen=True)
class _Pair:
    """The same prompt without and with speculation."""

    name: str
    off: RequestOutput
    on: RequestOutput

    @property
    def ratio(self) -> float:
        return self.on.stats.tokens_per_second / max(self.off.stats.tokens_per_second, 1e-9)

    @property
    def identical(self) -> bool:
        return self.off.token_ids == self.on.token_ids


def demo(
    model: Annotated[
        str, typer.Argument(help="A named model, a hub id, a folder, or a .gguf file.")
    ] = DEFAULT_MODEL,
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
    console.print(_table(pairs))
    console.print(_conclusion(pairs, dtype), soft_wrap=True)


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
            if error.field != "prompt":
                raise
            self._has_template = False
            self.complete(_WARM_UP_PROMPT, mode="auto")

    def stream(self, text: str) -> GenerateStream:
        return self._client.generate(self._prompt(text), self._params)

    def complete(self, text: str, mode: str) -> RequestOutput:
        return self._client.complete(self._prompt(text), self._params, Speculation(mode=mode))

    def _prompt(self, text: str) -> Prompt:
        return [{"role": "user", "content": text}] if self._has_template else text


def _compare(asker: _Asker) -> list[_Pair]:
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
        pairs.append(_Pair(name, outputs["off"], outputs["auto"]))
    return pairs


def _table(pairs: list[_Pair]) -> Table:
    from rich.table import Table

    table = Table(
        "prompt", title="tokens/s with speculation off and on: same greedy requests, same server"
    )
    for column in ("tokens", "off", "on", "on / off", "acceptance length"):
        table.add_column(column, justify="right")
    table.add_column("identical")
    for pair in pairs:
        table.add_row(
            pair.name,
            str(len(pair.on.token_ids)),
            f"{pair.off.stats.tokens_per_second:.1f}",
            f"{pair.on.stats.tokens_per_second:.1f}",
            f"{pair.ratio:.2f}",
            f"{pair.on.stats.acceptance_length:.2f}",
            "yes" if pair.identical else "no",
        )
    table.add_section()
    table.add_row(
        "median",
        "",
        f"{statistics.median(p.off.stats.tokens_per_second for p in pairs):.1f}",
        f"{statistics.median(p.on.stats.tokens_per_second for p in pairs):.1f}",
        f"{statistics.median(p.ratio for p in pairs):.2f}",
        f"{statistics.median(p.on.stats.acceptance_length for p in pairs):.2f}",
        f"{sum(p.identical for p in pairs)} of {len(pairs)}",
    )
    return table


def _conclusion(pairs: list[_Pair], dtype: str) -> str:
    """What the table means, in words that hold for these runs only."""
    lines = [
        "tokens/s counts from the first token to the last. The draft looks up what was written "
        "before, so it pays where text repeats (code, corrections, lists) and not in a story."
    ]
    different = [pair for pair in pairs if not pair.identical]
    if not different:
        lines.append(f"All {len(pairs)} texts are identical with and without speculation.")
    elif dtype in _FP32_NAMES:
        lines.append(
            f"Texts differ: {', '.join(p.name for p in different)}. In fp32 they should not: "
            "please report this."
        )
    else:
        where = ", ".join(f"{p.name} (token {_first_difference(p)})" for p in different)
        lines.append(
            f"Texts differ: {where}. 16-bit arithmetic rounds differently for one row and for "
            "several, and where two tokens are nearly equal the choice flips; from there on both "
            "are greedy answers. With --dtype fp32 the texts agree."
        )
    return "\n".join(lines)


def _first_difference(pair: _Pair) -> int:
    same = takewhile(
        lambda two: two[0] == two[1], zip(pair.off.token_ids, pair.on.token_ids, strict=False)
    )
    return sum(1 for _ in same)
