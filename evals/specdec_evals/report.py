"""The table of a comparison."""

from __future__ import annotations

from rich.table import Table

from specdec_evals.estimates import Estimate
from specdec_evals.measure import ArmSummary, Summary


def table(summary: Summary) -> Table:
    """A rich table of one column an arm; brackets hold 95 % bootstrap intervals over questions."""
    title = f"{summary.num_questions} questions, greedy, cold; medians [95 % interval]"
    if summary.num_left_out:
        title += f"; {summary.num_left_out} left out of the speeds (fewer than two tokens)"
    made = Table(title=title)
    made.add_column("")
    for arm in summary.arms:
        made.add_column(arm.name, justify="right")
    first = summary.arms[0].name
    headings = (
        "weights",
        "tokens/s",
        f"x {first}",
        "x plain",
        "acceptance length",
        "first token, ms",
        "end-to-end tokens/s",
        f"same ids as {first}",
        "same ids as plain",
    )
    columns = [_cells(arm, summary.num_questions) for arm in summary.arms]
    for heading, *cells in zip(headings, *columns, strict=True):
        made.add_row(heading, *cells)
    return made


def _cells(arm: ArmSummary, num_questions: int) -> list[str]:
    def count(number: int | None) -> str:
        return "-" if number is None else f"{number} of {num_questions}"

    return [
        arm.dtype,
        _figure(arm.tokens_per_second, 1),
        _figure(arm.against_first, 2),
        "-" if arm.against_plain is None else _figure(arm.against_plain, 2),
        f"{arm.acceptance_length:.2f}",
        f"{arm.time_to_first_token_ms:.0f}",
        f"{arm.end_to_end_tokens_per_second:.1f}",
        count(arm.same_as_first),
        count(arm.same_as_plain),
    ]


def _figure(estimate: Estimate, digits: int) -> str:
    value, low, high = (
        f"{figure:.{digits}f}" for figure in (estimate.value, estimate.low, estimate.high)
    )
    return rf"{value} \[{low}, {high}]"
