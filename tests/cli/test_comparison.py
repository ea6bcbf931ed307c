"""What the demo says, from made-up answers."""

from __future__ import annotations

import math

from rich.console import Console

from specdec.cli.comparison import (
    Pair,
    comparison_table,
    conclusion,
    first_difference,
    probability_gap,
)
from specdec.output import RequestOutput, RequestStats, TokenLogprobs
from specdec.request import FinishReason


def output(
    token_ids: tuple[int, ...],
    seconds: float = 1.0,
    passes: int = 1,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
) -> RequestOutput:
    stats = RequestStats(
        num_output_tokens=len(token_ids), num_decode_passes=passes, last_token_time=seconds
    )
    return RequestOutput("r", (), token_ids, "", FinishReason.LENGTH, None, logprobs, 0, stats)


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2, 4]) == 2


def test_table_shows_medians() -> None:
    ids = tuple(range(11))
    pairs = [
        Pair("a", output(ids, 2.0, 10), output(ids, 1.0, 5)),
        Pair("b", output(ids, 2.0, 10), output(ids, 2.0, 10)),
        Pair("c", output(ids, 1.0, 10), output((9, *ids[1:]), 0.25, 4)),
    ]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(comparison_table(pairs))
    rows = [
        [cell.strip() for cell in line.strip("│┃ ").split("│")]
        for line in capture.get().splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["a", "11", "5.0", "10.0", "2.00", "2.00", "yes"],
        ["b", "11", "5.0", "5.0", "1.00", "1.00", "yes"],
        ["c", "11", "10.0", "40.0", "4.00", "2.50", "no"],
        ["median", "", "5.0", "10.0", "2.00", "2.00", "2 of 3"],
    ]


def test_gap_is_looked_up_where_the_answers_part() -> None:
    asked = []

    def ask_again(count: int) -> RequestOutput:
        asked.append(count)
        entries = tuple(
            TokenLogprobs(token, -0.5, 1, {token: -0.5, 8: -0.75}) for token in (1, 2, 3)[:count]
        )
        return output((1, 2, 3)[:count], logprobs=entries)

    assert probability_gap(output((1, 2, 3)), output((1, 2, 3)), ask_again) == 0.0
    assert asked == []
    assert probability_gap(output((1, 2, 3)), output((1, 8, 3)), ask_again) == 0.25
    assert asked == [2]
    assert math.isinf(probability_gap(output((1, 2, 3)), output((1, 7, 3)), ask_again))


def test_conclusion_is_honest() -> None:
    same = Pair("a", output((1, 2)), output((1, 2)))
    near = Pair("b", output((1, 2)), output((1, 3)), 0.12)
    far = Pair("c", output((1, 2)), output((1, 3)), 3.0)
    assert "All 1 texts are identical" in conclusion([same])
    rounded = conclusion([same, near])
    assert "b: differs from token 2 on, where the two choices were 0.12 apart" in rounded
    assert "greedy up to rounding" in rounded
    assert "identical" not in rounded
    assert "please report it" in conclusion([same, near, far])
