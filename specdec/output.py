"""What a caller gets: tokens, text, log-probabilities and statistics of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specdec.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one emitted position, natural logarithm.

    token_id, logprob: the emitted token. rank: 1 + number of tokens that are more probable.
    top: token id to log-probability of the most probable tokens, best first, ties by lowest id.
    """

    token_id: int
    logprob: float
    rank: int
    top: Mapping[int, float]


@dataclass(slots=True)
class RequestStats:
    """Counts of one request; sums over requests are the engine's counters.

    num_decode_passes: target passes after the first emitted token, drafted or not.
    num_spec_steps: passes whose tree had at least one drafted node.
    num_draft_tokens: drafted nodes that were scored. num_draft_path_tokens: depth of those trees.
    acceptance_histogram: index a counts the passes with drafts that accepted a drafted nodes.
    num_cached_tokens: tokens whose KV was there at admission: in the prefix cache, or computed for
        another answer to the prompt.
    first_token_time, last_token_time, arrival_time: seconds on the monotonic clock.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_decode_passes: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_draft_path_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_preemptions: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    arrival_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens after the first, per decode pass; plain decoding is 1.0 (Spec-Bench)."""
        if self.num_decode_passes == 0:
            return 1.0
        return (self.num_output_tokens - 1) / self.num_decode_passes

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafted nodes per pass that had drafts (vLLM's field of this name)."""
        if self.num_spec_steps == 0:
            return 1.0
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafted nodes over all drafted tree nodes (siblings count), 0 without drafts."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    @property
    def path_acceptance_rate(self) -> float:
        """Accepted drafted nodes over the depth of the drafted trees, 0 without drafts."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_path_tokens)

    @property
    def tokens_per_second(self) -> float:
        """(n - 1) / (time of the last token - time of the first), 0 for fewer than two tokens."""
        elapsed = self.last_token_time - self.first_token_time
        return (self.num_output_tokens - 1) / elapsed if elapsed > 0 else 0.0

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival to the first emitted token."""
        return max(0.0, self.first_token_time - self.arrival_time)

    def snapshot(self) -> RequestStats:
        """A copy that later steps do not change."""
        return replace(self, acceptance_histogram=list(self.acceptance_histogram))

    def record_pass(self, num_drafted: int, depth: int, num_accepted: int) -> None:
        """Count one pass after the first token: drafted nodes, tree depth, accepted nodes."""
        self.num_decode_passes += 1
        if num_drafted == 0:
            return
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_draft_path_tokens += depth
        self.num_accepted_draft_tokens += num_accepted
        while len(self.acceptance_histogram) <= num_accepted:
            self.acceptance_histogram.append(0)
        self.acceptance_histogram[num_accepted] += 1


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What one step added to one request; deltas joined in order are the whole answer.

    token_ids: emitted by this step. text: text that became final. logprobs: one entry a token id,
    empty if not asked for. finish_reason: set on the last delta only; stop_reason: the stop string
    or token id that ended the request, None for an EOS, a length or an abort.
    error: message of the failure that ended the request, else None; error_field: the field of the
    request that caused it, None if it is not the request's fault.
    index: which of the request's n answers this belongs to; each ends with a delta of its own.
    prompt_logprobs: on answer 0's first delta, if asked for: one entry a prompt token, None for the
    first one.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    stats: RequestStats
    error: str | None = None
    error_field: str | None = None
    index: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The whole answer to one prompt.

    prompt_token_ids: the prompt as the model saw it. token_ids: emitted tokens, an ending EOS or
    stop token included. text: their text, cut before a stop string; an ending EOS or stop token has
    no text. logprobs: one entry a token id, or None if not asked for. seed: the seed in force.
    prompt_logprobs: one entry a prompt token (None for the first), or None if not asked for.
    index: of this answer among the n of its prompt. siblings: on answer 0, the other answers.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    seed: int
    stats: RequestStats
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    index: int = 0
    siblings: tuple[RequestOutput, ...] = ()

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """All n answers to the prompt, this one first."""
        return (self, *self.siblings)
