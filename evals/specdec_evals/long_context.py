"""A long prompt beside a running stream: how long the stream waits, and what memory grows to.

    python -m specdec_evals.long_context [--prompt-tokens 8000] [--chunk-tokens 128] [--dtype bf16]

A stream decodes; while it runs, a long prompt arrives and is computed in chunks. A gap is the time
between two deltas of the stream. Resident memory is read after every step, so that what a token of
context costs, and any peak above it, show.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

if TYPE_CHECKING:
    from specdec.engine import Engine

STREAM, LONG = "stream", "long"
_TEXT = "The committee met again on the following day and went through the list from the start. "


@dataclass(frozen=True)
class LongContext:
    """What one run showed. Times in ms, memory in MB (1e6 bytes).

    gaps_before: of the stream alone. gaps_beside: while the prompt is computed. rss: resident
    memory after each step of the prompt, with the tokens computed by then.
    """

    prompt_tokens: int
    seconds_to_first_token: float
    gaps_before: list[float]
    gaps_beside: list[float]
    rss: list[tuple[int, float]]
    kv_bytes_per_token: int

    @property
    def longest_over_median(self) -> float:
        """Longest gap while the prompt was computed, over the median gap of the stream alone."""
        return max(self.gaps_beside) / statistics.median(self.gaps_before)

    @property
    def growth_per_token(self) -> float:
        """Bytes of resident memory per token, from a quarter of the prompt to its end."""
        start = next(entry for entry in self.rss if entry[0] >= self.prompt_tokens // 4)
        end = self.rss[-1]
        return 1e6 * (end[1] - start[1]) / max(1, end[0] - start[0])


def run(engine: Engine, prompt: Sequence[int], stream_prompt: Sequence[int]) -> LongContext:
    """Answer both requests on an idle engine; the stream goes on until the prompt is computed."""
    from specdec.request import SamplingParams, Speculation

    process = psutil.Process()
    off = Speculation(mode="off")
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.add_request(STREAM, stream_prompt, endless, off)
    times: list[float] = []

    def step() -> set[str]:
        seen = {delta.request_id for delta in engine.step()}
        if STREAM in seen:
            times.append(time.perf_counter())
        return seen

    for _ in range(24):
        step()
    num_before = len(times)
    long = engine.add_request(LONG, prompt, SamplingParams(temperature=0.0, max_tokens=1), off)
    start, rss = time.perf_counter(), []
    while LONG not in step():
        rss.append((long.num_computed, process.memory_info().rss / 1e6))
    seconds = time.perf_counter() - start
    num_beside = len(times)
    engine.abort(STREAM)
    gaps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
    return LongContext(
        len(prompt),
        seconds,
        gaps[2 : num_before - 1],
        gaps[num_before - 1 : num_beside - 1],
        rss,
        engine.kv_bytes_per_token,
    )


def table(results: Sequence[tuple[int, LongContext]]) -> Table:
    """One row a chunk size."""
    made = Table(title="A long prompt beside a running stream")
    for heading in ("chunk", "prompt", "first token, s", "median gap alone, ms",
                    "median gap beside, ms", "longest gap, ms", "longest / median alone",
                    "memory a token, kB", "of which KV, kB"):  # fmt: skip
        made.add_column(heading, justify="right")
    for chunk, result in results:
        made.add_row(
            str(chunk), str(result.prompt_tokens), f"{result.seconds_to_first_token:.1f}",
            f"{statistics.median(result.gaps_before):.0f}",
            f"{statistics.median(result.gaps_beside):.0f}", f"{max(result.gaps_beside):.0f}",
            f"{result.longest_over_median:.1f}", f"{result.growth_per_token / 1e3:.1f}",
            f"{result.kv_bytes_per_token / 1e3:.1f}",
        )  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="specdec_evals.long_context", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--prompt-tokens", type=int, default=8000)
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    options = parser.parse_args(arguments)
    if options.prompt_tokens < 1000:
        parser.error("--prompt-tokens must be at least 1000: the prompt is to take many steps")

    from specdec.errors import SpecdecError
    from specdec.llm import LLM
    from specdec_evals.provenance import provenance

    console = Console()
    results: list[tuple[int, LongContext]] = []
    record: dict[str, Any] = {"provenance": provenance(), "runs": []}
    try:
        for chunk in track(options.chunk_tokens, console=console, description="Chunk sizes"):
            llm = LLM(options.model, dtype=options.dtype, draft="none", max_chunk_tokens=chunk)
            assert llm.engine.tokenizer is not None
            ids = llm.engine.tokenizer.encode(_TEXT * (options.prompt_tokens // 10))
            prompt = ids[: options.prompt_tokens]
            result = run(llm.engine, prompt, prompt[:32])
            results.append((chunk, result))
            record["runs"].append({"chunk_tokens": chunk, **asdict(result)})
            del llm
    except SpecdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print(table(results))
    if options.output is not None:
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
