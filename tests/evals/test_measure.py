"""The order of a measurement, and what its summary counts."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from specdec_evals.arms import Answer
from specdec_evals.measure import measure, summarize
from specdec_evals.prompts import Prompt
from specdec_evals.report import table


class ScriptedArm:
    """Answers with given tokens at a given speed and keeps a log of who was asked."""

    def __init__(
        self,
        name: str,
        speed: float,
        log: list[tuple[str, int]],
        *,
        dtype: str = "bf16",
        tokens: Sequence[int] = (5, 6, 7, 8, 9),
        passes: int = 4,
    ) -> None:
        self.name = name
        self.dtype = dtype
        self._speed = speed
        self._log = log
        self._tokens = tuple(tokens)
        self._passes = passes

    def answer(self, prompt_token_ids: Sequence[int], max_tokens: int) -> Answer:
        self._log.append((self.name, prompt_token_ids[0]))
        tokens = self._tokens[:max_tokens] if prompt_token_ids[0] else self._tokens[:1]
        last = 1.0 + (len(tokens) - 1) / self._speed
        return Answer(tokens, 0.5, 1.0, last, self._passes if len(tokens) > 1 else 0)


def prompts(count: int, start: int = 1) -> list[tuple[Prompt, list[int]]]:
    return [(Prompt(str(n), "c", f"q{n}"), [n]) for n in range(start, start + count)]


def test_arms_are_interleaved_and_the_first_rotates() -> None:
    log: list[tuple[str, int]] = []
    arms = [ScriptedArm("a", 1.0, log), ScriptedArm("b", 1.0, log)]
    samples = measure(arms, prompts(2), rounds=2, max_tokens=5, progress=False)
    first_round = [("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    second_round = [("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert log == first_round + second_round
    assert [(sample.arm, sample.round) for sample in samples[4:6]] == [("b", 1), ("a", 1)]


def test_summary_of_known_answers() -> None:
    log: list[tuple[str, int]] = []
    arms = [
        ScriptedArm("transformers", 10.0, log, dtype="fp32"),
        ScriptedArm("plain", 20.0, log),
        ScriptedArm("ngram", 30.0, log, passes=2),
        ScriptedArm("other", 30.0, log, tokens=(5, 6, 7, 8, 1)),
    ]
    samples = measure(arms, prompts(3), rounds=2, max_tokens=5, progress=False)
    summary = summarize(samples, arms)
    transformers, plain, ngram, other = summary.arms
    assert summary.num_questions == 3
    assert plain.tokens_per_second.value == pytest.approx(20.0)
    assert plain.against_first.value == pytest.approx(2.0)
    assert ngram.against_plain is not None
    assert ngram.against_plain.value == pytest.approx(1.5)
    assert (plain.acceptance_length, ngram.acceptance_length) == (1.0, 2.0)
    assert ngram.time_to_first_token_ms == pytest.approx(500.0)
    assert ngram.end_to_end_tokens_per_second == pytest.approx(5 / (0.5 + 4 / 30))
    assert (transformers.same_as_first, plain.same_as_first) == (3, None)
    assert (ngram.same_as_plain, other.same_as_plain) == (3, 0)


def test_question_without_a_speed_is_left_out_and_said_so() -> None:
    arms = [ScriptedArm("transformers", 10.0, []), ScriptedArm("plain", 20.0, [])]
    samples = measure(arms, prompts(3, start=0), rounds=1, max_tokens=5, progress=False)
    summary = summarize(samples, arms)
    assert (summary.num_questions, summary.num_left_out) == (3, 1)
    assert summary.arms[1].tokens_per_second.low == pytest.approx(20.0)
    with pytest.raises(ValueError, match="two tokens"):
        summarize(samples[:2], arms)


def test_without_a_plain_arm_nothing_is_compared_with_it() -> None:
    arms = [ScriptedArm("transformers", 10.0, []), ScriptedArm("ngram", 20.0, [])]
    samples = measure(arms, prompts(2), rounds=1, max_tokens=5, progress=False)
    assert summarize(samples, arms).arms[1].against_plain is None


def test_table_shows_figures_and_counts() -> None:
    arms = [ScriptedArm("transformers", 10.0, [], dtype="fp32"), ScriptedArm("plain", 20.0, [])]
    samples = measure(arms, prompts(2), rounds=1, max_tokens=5, progress=False)
    console = Console(file=io.StringIO(), width=80)
    console.print(table(summarize(samples, arms)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "20.0 [20.0, 20.0]" in text
    assert "2.00 [2.00, 2.00]" in text
    assert "2 of 2" in text
