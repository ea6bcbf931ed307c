"""A request while it lives in the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specdec.cache import BlockTable
from specdec.errors import InvalidRequestError
from specdec.output import RequestDelta, RequestStats
from specdec.request import SamplingParams, Speculation
from specdec.sampling.answer import Answer
from specdec.sampling.law import TokenLaw
from specdec.sampling.prompt_logprobs import PromptLogprobs


class Request:
    """One answer to one prompt: its tokens, its law, its block table and its counts.

    token_ids: prompt and emitted tokens. The tokens past table.num_committed have no KV yet: one
    (the root) when decoding, more while a prompt or a preempted request is being computed.
    params: resolved. The scheduler owns `table` (None while waiting).
    prompt_logprobs: set if asked for.

    Of a prompt with n answers each is a Request: answer 0 is the leader, whose id is the caller's;
    the others are its siblings and share the pages of its prompt.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        speculation: Speculation,
        law: TokenLaw,
        answer: Answer,
        *,
        prompt_logprobs: PromptLogprobs | None = None,
        leader: Request | None = None,
        index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.leader = leader
        self.index = index
        self.siblings: list[Request] = []
        self.prompt_logprobs = prompt_logprobs
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.params = params
        self.speculation = speculation
        self.law = law
        self.answer = answer
        self.table: BlockTable | None = None
        self._has_delivered = False  # the log-probabilities of the prompt
        self.stats = RequestStats(
            num_prompt_tokens=len(prompt_token_ids), arrival_time=time.monotonic()
        )

    @property
    def seed(self) -> int:
        """The seed in force, drawn from the operating system if the caller gave none."""
        assert self.params.seed is not None
        return self.params.seed

    @property
    def block_table(self) -> BlockTable:
        """The block table of a request that runs."""
        assert self.table is not None
        return self.table

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is committed."""
        return self.table.num_committed if self.table is not None else 0

    @property
    def num_pending(self) -> int:
        """Tokens without KV, at least one."""
        return len(self.token_ids) - self.num_computed

    def draft_limits(self) -> tuple[int, int]:
        """Drafted nodes and depth that make sense in the next step; (0, 0) if drafting does not.

        No drafts before the first token, nor while anything but the root lacks KV. A tree of depth
        d emits up to d + 1 tokens, so the room left bounds the depth.
        """
        nodes = self.speculation.node_limit
        depth = min(self.speculation.max_depth, self.answer.room - 1)
        if nodes == 0 or depth <= 0 or self.num_pending != 1 or not self.answer.token_ids:
            return 0, 0
        return nodes, depth

    def delta(self, error: Exception | None = None) -> RequestDelta:
        """What came since the last delta. error: what ended the request, if something did."""
        token_ids, text, logprobs = self.answer.take()
        message = field = prompt_logprobs = None
        if isinstance(error, InvalidRequestError):
            message, field = error.message, error.field
        elif error is not None:
            message = f"{type(error).__name__}: {error}"
        entries = self.prompt_logprobs
        if entries is not None and entries.is_complete and not self._has_delivered:
            prompt_logprobs = entries.take()
            self._has_delivered = True
        return RequestDelta(
            (self.leader or self).request_id,
            token_ids,
            text,
            logprobs,
            self.answer.finish_reason,
            self.answer.stop_reason,
            self.stats.snapshot(),
            error=message,
            error_field=field,
            index=self.index,
            prompt_logprobs=prompt_logprobs,
        )
