"""Prompt sets: JSON lines as Spec-Bench has them, and a small set of our own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

OWN_SET = Path(__file__).with_name("prompts.jsonl")

WARM_UP_TEXTS = (
    "Name three colours of the rainbow and say one sentence about each of them.",
    "Write down the numbers from one to thirty, separated by commas.",
)
"""Texts that no prompt set holds: whatever is measured has not been seen before."""


class PromptSetError(ValueError):
    """A prompt set that cannot be read; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. question_id: its id or line number. category: "" if the set has none.

    text: the first user turn.
    """

    question_id: str
    category: str
    text: str


def load_prompts(
    path: Path | None = None, *, stride: int = 1, limit: int | None = None
) -> list[Prompt]:
    """Every stride-th prompt of a JSON-lines file, from the first, at most limit; in file order.

    path: lines with turns[0] (text), and question_id and category if they have them; None is the
    set this package ships. Empty lines are skipped and do not count.

    Raises PromptSetError.
    """
    source = OWN_SET if path is None else path
    if stride < 1:
        raise PromptSetError(f"stride must be at least 1, got {stride}")
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptSetError(f"{source}: cannot be read ({error})") from None
    prompts = [
        _prompt(line, f"{source}:{number}", number)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    chosen = prompts[::stride][:limit]
    ids = [prompt.question_id for prompt in chosen]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise PromptSetError(f"{source}: question_id {twice} appears more than once")
    if not chosen:
        raise PromptSetError(f"{source}: holds no prompt")
    return chosen


def _prompt(line: str, where: str, number: int) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptSetError(f"{where}: not a JSON object ({error})") from None
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise PromptSetError(f"{where}: field turns must be a list that begins with a text")
    return Prompt(str(record.get("question_id", number)), str(record.get("category", "")), turns[0])
