"""Every architecture: logits of a flat batch, and greedy text, equal those of transformers."""

from __future__ import annotations

import pytest

from specdec import SamplingParams
from specdec.testing import page_check
from tests.architectures.building import LENGTHS, NUM_TOKENS, SMALLEST_GAP, Served
from tests.architectures.cases import KINDS, WINDOW
from tests.architectures.flat import worst_row


def test_logits_of_a_flat_batch(served: Served) -> None:
    """Rows of four requests of unequal lengths, three of them with trees, within 1e-4."""
    assert worst_row(served.model) < 1e-4


def test_the_answers_are_beyond_rounding(served: Served) -> None:
    """What the next test compares would otherwise hang on the last bit of a logit."""
    assert served.smallest_gap() > SMALLEST_GAP
    assert max(LENGTHS) > WINDOW < min(LENGTHS) + NUM_TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text(served: Served, kind: str) -> None:
    """Alone, and in a batch of four rows of unequal lengths."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    speculation = served.speculation(kind)
    alone = served.llm.generate(served.prompts[0], params, speculation=speculation)
    batch = served.llm.generate(served.prompts, params, speculation=speculation)
    for prompt, output in zip([served.prompts[0], *served.prompts], alone + batch, strict=True):
        assert list(output.token_ids) == served.answers[tuple(prompt)], (kind, len(prompt))
    drafted = sum(output.stats.num_draft_tokens for output in alone + batch)
    accepted = sum(output.stats.num_accepted_draft_tokens for output in alone + batch)
    passes = sum(output.stats.num_spec_steps for output in alone + batch)
    assert (drafted > 0) == (kind != "none")
    if kind == "self-tree":
        assert accepted > 1.5 * passes
    assert page_check(served.llm.engine) == 0
