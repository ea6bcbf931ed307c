"""What the demo says about answers with and without speculation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from specdec.output import RequestOutput

if TYPE_CHECKING:
    from rich.table import Table

ROUNDING_GAP = 0.5
"""Log-probability between two tokens that 16-bit rounding can still swap: two steps of a bf16
logit between 32 and 64."""


@dataclass(frozen=True)
class Pair:
    """The same greedy request without and with speculation.

    gap: if the answers differ, by how much the token chosen without speculation was more probable
    (natural logarithm, as computed without it) than the one chosen with it; infinite if that one
    was not among the best.
    """

    name: str
    off: RequestOutput
    on: RequestOutput
    gap: float = 0.0

    @property
    def ratio(self) -> float:
        """Tokens/s with speculation over tokens/s without."""
        return self.on.stats.tokens_per_second / max(self.off.stats.tokens_per_second, 1e-9)

    @property
    def identical(self) -> bool:
        """Whether the token ids are the same."""
        return self.off.token_ids == self.on.token_ids


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length if none does."""
    return sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(one, other, strict=False)))


def probability_gap(
    off: RequestOutput, on: RequestOutput, ask_again: Callable[[int], RequestOutput]
) -> float:
    """Pair.gap of two answers; ask_again(n) repeats `off` for n tokens with log-probabilities."""
    at = first_difference(off.token_ids, on.token_ids)
    if at == min(len(off.token_ids), len(on.token_ids)):
        return 0.0
    logprobs = ask_again(at + 1).logprobs
    top = logprobs[at].top if logprobs is not None and len(logprobs) > at else {}
    chosen, other = top.get(off.token_ids[at]), top.get(on.token_ids[at])
    return chosen - other if chosen is not None and other is not None else float("inf")


def comparison_table(pairs: Sequence[Pair]) -> Table:
    """One row a prompt, and the medians."""
    from rich.table import Table

    table = Table(
        "prompt", title="tokens/s with speculation off and on: same greedy requests, same server"
    )
    for column in ("tokens", "off", "on", "on / off", "acceptance length"):
        table.add_column(column, justify="right")
    table.add_column("identical")
    for pair in pairs:
        identical = "yes" if pair.identical else "no"
        table.add_row(pair.name, str(len(pair.on.token_ids)), *_numbers([pair]), identical)
    table.add_section()
    identical = f"{sum(pair.identical for pair in pairs)} of {len(pairs)}"
    table.add_row("median", "", *_numbers(pairs), identical)
    return table


def _numbers(pairs: Sequence[Pair]) -> list[str]:
    """Medians of what the numeric columns show."""
    columns = [
        ([pair.off.stats.tokens_per_second for pair in pairs], 1),
        ([pair.on.stats.tokens_per_second for pair in pairs], 1),
        ([pair.ratio for pair in pairs], 2),
        ([pair.on.stats.acceptance_length for pair in pairs], 2),
    ]
    return [f"{statistics.median(values):.{digits}f}" for values, digits in columns]


def conclusion(pairs: Sequence[Pair]) -> str:
    """What the table means, in words that hold for these runs only."""
    lines = [
        "tokens/s counts from the first token to the last. The draft looks up what was written "
        "before, so it pays where text repeats and not in a story."
    ]
    different = [pair for pair in pairs if not pair.identical]
    if not different:
        lines.append(f"All {len(pairs)} texts are identical with and without speculation.")
        return "\n".join(lines)
    for pair in different:
        at = first_difference(pair.off.token_ids, pair.on.token_ids)
        lines.append(
            f"{pair.name}: differs from token {at + 1} on, where the two choices were "
            f"{pair.gap:.2f} apart in log-probability."
        )
    if all(pair.gap <= ROUNDING_GAP for pair in different):
        lines.append(
            "That close, 16-bit arithmetic, which rounds one row and several rows differently, "
            "can swap them; both texts are greedy up to rounding. --dtype fp32 avoids it."
        )
    else:
        lines.append("Rounding does not explain that: please report it.")
    return "\n".join(lines)
