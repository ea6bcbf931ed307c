"""Interleaved runs of several arms over the same prompts, and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from specdec_evals.arms import Answer, Arm
from specdec_evals.estimates import Estimate, Floats, median_of, ratio_of_medians
from specdec_evals.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of one arm to one prompt in one round."""

    arm: str
    round: int
    prompt: Prompt
    answer: Answer

    def record(self) -> dict[str, Any]:
        """The sample for a JSON file, without the prompt's text."""
        return {
            "arm": self.arm,
            "round": self.round,
            "question_id": self.prompt.question_id,
            "category": self.prompt.category,
            "num_tokens": len(self.answer.token_ids),
            "num_decode_passes": self.answer.num_decode_passes,
            "tokens_per_second": self.answer.tokens_per_second,
            "time_to_first_token_s": self.answer.first - self.answer.start,
            "end_to_end_tokens_per_second": self.answer.end_to_end_tokens_per_second,
            "token_ids": list(self.answer.token_ids),
        }


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """What one arm did; estimates are over the questions that every arm answered with two tokens.

    tokens_per_second, time_to_first_token_ms, end_to_end_tokens_per_second: medians.
    against_first, against_plain: ratios of medians to the first arm's and the plain arm's.
    acceptance_length: (emitted tokens - 1) / decode passes, summed over all answers.
    same_as_first, same_as_plain: questions with the same token ids in every round; None where the
    weights' dtypes differ.
    """

    name: str
    dtype: str
    tokens_per_second: Estimate
    against_first: Estimate
    against_plain: Estimate | None
    acceptance_length: float
    time_to_first_token_ms: float
    end_to_end_tokens_per_second: float
    same_as_first: int | None
    same_as_plain: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """All arms, in the order they were given.

    num_questions: questions measured. num_left_out: of those, the ones without tokens/s.
    """

    num_questions: int
    num_left_out: int
    arms: list[ArmSummary]


def measure(
    arms: Sequence[Arm],
    prompts: Sequence[tuple[Prompt, Sequence[int]]],
    *,
    rounds: int,
    max_tokens: int,
    progress: bool = True,
) -> list[Sample]:
    """Answer every prompt with every arm, `rounds` times.

    prompts: each with its token ids. All arms answer a prompt before the next one comes; who goes
    first rotates, so that what a machine does meanwhile falls on all of them alike.
    """
    samples = []
    bar = tqdm(
        total=rounds * len(prompts) * len(arms), unit="answer", disable=None if progress else True
    )
    with bar:
        for number in range(rounds):
            for index, (prompt, token_ids) in enumerate(prompts):
                first = (number + index) % len(arms)
                for arm in (*arms[first:], *arms[:first]):
                    bar.set_description(arm.name)
                    answer = arm.answer(token_ids, max_tokens)
                    samples.append(Sample(arm.name, number, prompt, answer))
                    bar.update()
    return samples


def summarize(samples: Sequence[Sample], arms: Sequence[Arm]) -> Summary:
    """Medians, ratios and counts of a measurement.

    Raises ValueError if no question has tokens/s in every arm.
    """
    questions = list(dict.fromkeys(sample.prompt.question_id for sample in samples))
    by_arm = {
        arm.name: {
            question: [
                sample.answer
                for sample in samples
                if sample.arm == arm.name and sample.prompt.question_id == question
            ]
            for question in questions
        }
        for arm in arms
    }
    kept = [
        question
        for question in questions
        if all(
            answer.tokens_per_second is not None
            for answers in by_arm.values()
            for answer in answers[question]
        )
    ]
    if not kept:
        raise ValueError("no question was answered with two tokens or more by every arm")
    plain = next((arm for arm in arms if arm.name == "plain"), None)
    summaries = [_summarize_arm(arm, arms[0], plain, by_arm, kept) for arm in arms]
    return Summary(len(questions), len(questions) - len(kept), summaries)


Answers = dict[str, dict[str, list[Answer]]]
"""Arm name to question id to the answers of the rounds."""


def _summarize_arm(
    arm: Arm, first: Arm, plain: Arm | None, answers: Answers, kept: Sequence[str]
) -> ArmSummary:
    own = answers[arm.name]
    speeds = _speeds(own, kept)
    everything = [answer for rounds in own.values() for answer in rounds]
    measured = [answer for question in kept for answer in own[question]]
    passes = sum(answer.num_decode_passes for answer in everything)
    emitted = sum(len(answer.token_ids) - 1 for answer in everything)
    return ArmSummary(
        name=arm.name,
        dtype=arm.dtype,
        tokens_per_second=median_of(speeds),
        against_first=ratio_of_medians(speeds, _speeds(answers[first.name], kept)),
        against_plain=(
            None if plain is None else ratio_of_medians(speeds, _speeds(answers[plain.name], kept))
        ),
        acceptance_length=emitted / passes if passes else 1.0,
        time_to_first_token_ms=float(np.median([1e3 * (a.first - a.start) for a in measured])),
        end_to_end_tokens_per_second=float(
            np.median([answer.end_to_end_tokens_per_second for answer in measured])
        ),
        same_as_first=_num_same(arm, first, answers),
        same_as_plain=None if plain is None else _num_same(arm, plain, answers),
    )


def _speeds(answers: dict[str, list[Answer]], kept: Sequence[str]) -> Floats:
    """[num_questions] tokens/s of each kept question, the median over its rounds."""
    return np.array(
        [np.median([answer.tokens_per_second or 0.0 for answer in answers[q]]) for q in kept]
    )


def _num_same(arm: Arm, other: Arm, answers: Answers) -> int | None:
    if arm.dtype != other.dtype:
        return None
    return sum(
        len({answer.token_ids for answer in (*rounds, *answers[other.name][question])}) == 1
        for question, rounds in answers[arm.name].items()
    )
