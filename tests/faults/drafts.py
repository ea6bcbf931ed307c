"""The drafts that a fault is tried with: one engine has them all, a request names its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec import Speculation
from specdec.testing import OracleDrafter, RandomDrafter
from specdec_drafts.base import Drafter

BUSHY = (4, 4)


def fault_drafts(
    vocab_size: int,
    answers: Mapping[Any, Sequence[int]],
    lengths: Sequence[int] = (1, 4, 8),
    shape: Sequence[int] = BUSHY,
) -> list[str | Drafter]:
    """ngram; SELF and NOISY chains of each length and trees of the shape; RANDOM chain and trees.

    answers: what SELF says, as for OracleDrafter.
    """
    drafts: list[str | Drafter] = ["ngram"]
    shapes: dict[str, Any] = {f"{length}": length for length in lengths} | {"tree": shape}
    for label, form in shapes.items():
        drafts.append(OracleDrafter(answers, vocab_size, form, name=f"self-{label}"))
        drafts.append(
            OracleDrafter(answers, vocab_size, form, accuracy=0.5, name=f"noisy-{label}")
        )  # fmt: skip
    drafts.append(RandomDrafter(vocab_size, max(lengths), name="random-chain"))
    drafts.append(RandomDrafter(vocab_size, name="random-tree"))
    return drafts


def speculations(drafts: Sequence[str | Drafter]) -> dict[str, Speculation]:
    """off, and one Speculation for each draft alone, by name."""
    names = [draft if isinstance(draft, str) else draft.name for draft in drafts]
    return {"off": Speculation(mode="off")} | {
        name: Speculation(mode="fixed", max_nodes=24, max_depth=15, drafts=[name]) for name in names
    }
