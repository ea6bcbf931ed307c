"""Counters of an engine; the sums over its requests."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.output import RequestStats

_SUMMED = (
    "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_decode_passes",
    "num_spec_steps", "num_draft_tokens", "num_draft_path_tokens", "num_accepted_draft_tokens",
    "num_preemptions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """A snapshot of an engine.

    Each of a prompt's n answers counts as a request. num_passes: target passes so far.
    num_used_pages: pages that running requests hold; num_cached_pages: free pages whose content is
    kept. Then the requests that have ended, and the sums of all requests' counts
    (specdec.output.RequestStats), running ones included.
    """

    num_running: int
    num_waiting: int
    num_passes: int
    num_pages: int
    num_free_pages: int
    num_used_pages: int
    num_cached_pages: int
    num_finished: int
    num_aborted: int
    num_failed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_decode_passes: int
    num_spec_steps: int
    num_draft_tokens: int
    num_draft_path_tokens: int
    num_accepted_draft_tokens: int
    num_preemptions: int


def add_stats(total: dict[str, int], stats: RequestStats) -> None:
    """Add a request's counts to `total`, by field name."""
    for name in _SUMMED:
        total[name] = total.get(name, 0) + getattr(stats, name)


def zero_totals() -> dict[str, int]:
    """Totals of no requests."""
    return dict.fromkeys(_SUMMED, 0)
