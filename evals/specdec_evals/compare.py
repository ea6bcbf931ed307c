"""Speed of greedy decoding: transformers, plain decoding and speculation, on the same prompts.

    python -m specdec_evals.compare [PROMPTS.jsonl] [--stride N] [--rounds N] [--dtype bf16]

Requests are interleaved: each prompt is answered by every arm in turn before the next prompt, the
order of the arms rotating, and reset_state() comes before each answer. Figures per question are
medians over rounds; intervals resample questions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specdec_drafts import available_drafters
from specdec_evals.prompts import WARM_UP_TEXTS, Prompt, PromptSetError, load_prompts

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec_evals.arms import Arm

WARM_UP_TOKENS = 48
MODES = ("off", "fixed", "auto")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="specdec_evals.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("prompts", nargs="?", type=Path, help="JSON lines with turns[0]; default: the own set")
    add("--stride", type=int, default=1, help="take every Nth prompt")
    add("--limit", type=int, help="take at most N prompts")
    add("--model", default="smollm2-135m-instruct")
    add("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"), help="of specdec")
    add("--transformers-dtype", choices=("bf16", "fp16", "fp32"), help="default: the faster one")
    add("--draft", default="ngram", choices=sorted(available_drafters()))
    add("--modes", nargs="+", default=list(MODES), choices=MODES, help="speculation modes")
    add("--max-nodes", type=int, help="drafted nodes a step; default: the engine's")
    add("--rounds", type=int, default=1, help="times each prompt is answered by each arm")
    add("--max-tokens", type=int, default=256)
    add("--output", type=Path, help="JSON file; default: .benchmarks/compare-TIME.json")
    options = parser.parse_args(arguments)
    for name in ("stride", "rounds", "max_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's turn: in the chat template if there is one, else of the bare text."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def specdec_arms(llm: LLM, options: argparse.Namespace) -> list[Arm]:
    """One arm a speculation mode, all on the same engine."""
    from specdec.request import Speculation
    from specdec_evals.arms import SpecdecArm

    limits = {} if options.max_nodes is None else {"max_nodes": options.max_nodes}
    return [
        SpecdecArm(
            llm,
            "plain" if mode == "off" else f"{options.draft} {mode}",
            options.dtype,
            Speculation(mode=mode, **limits),
        )
        for mode in options.modes
    ]


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Load, warm up, measure; print the table and return the report."""
    from specdec.llm import LLM
    from specdec_evals.arms import faster_transformers
    from specdec_evals.measure import measure, summarize
    from specdec_evals.provenance import provenance
    from specdec_evals.report import table

    prompts = load_prompts(options.prompts, stride=options.stride, limit=options.limit)
    console.print(f"Loading {options.model} ({options.dtype}, draft {options.draft})")
    llm = LLM(options.model, dtype=options.dtype, draft=options.draft)
    warm_up = [encode(llm.tokenizer, text) for text in WARM_UP_TEXTS]
    warm_up_tokens = min(WARM_UP_TOKENS, options.max_tokens)
    chosen = options.transformers_dtype
    console.print("Timing transformers' generate() by dtype")
    baseline, speeds = faster_transformers(
        llm.model_path,
        warm_up,
        dtypes=[chosen] if chosen else ["fp32", "bf16"],
        max_tokens=warm_up_tokens,
    )
    arms = [baseline, *specdec_arms(llm, options)]
    for arm in arms:
        for token_ids in warm_up:
            arm.answer(token_ids, warm_up_tokens)
    encoded: list[tuple[Prompt, list[int]]] = [
        (prompt, encode(llm.tokenizer, prompt.text)) for prompt in prompts
    ]
    samples = measure(arms, encoded, rounds=options.rounds, max_tokens=options.max_tokens)
    summary = summarize(samples, arms)
    console.print(table(summary))
    return {
        "provenance": provenance(),
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
        },
        "transformers_tokens_per_second_by_dtype": speeds,
        "summary": dataclasses.asdict(summary),
        "samples": [sample.record() for sample in samples],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    from specdec.errors import SpecdecError

    options = parse_arguments(arguments)
    console = Console()
    try:
        report = run(options, console)
    except (PromptSetError, SpecdecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    output = options.output or Path(".benchmarks") / f"compare-{stamp}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
