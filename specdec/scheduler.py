"""Who takes part in a step: admission, chunks, node allowances, preemption."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from specdec.cache import BlockTable, CacheManager, OutOfPagesError
from specdec.config import CHUNK_CONTEXT, MIN_CHUNK_TOKENS, EngineConfig
from specdec.request_state import Request
from specdec.step import PlannedRequest, StepPlan

_PROMPT_LOGPROBS_ROWS = 128
"""Rows of a step at most whose logits over the whole vocabulary are kept for a prompt."""


class Scheduler:
    """Owns the queues and reserves the pages of every step.

    A step is planned in two passes. The first gives every running request the rows and pages of its
    pending tokens: those that only decode, then those with more pending tokens, the oldest first;
    then waiting ones join for as long as rows, pages and places are left. If pages run out, the
    youngest request is preempted: its pages go, its tokens stay, and it is computed again from the
    front of the queue. The second pass allows drafted nodes in what rows and pages are left, so
    speculation never preempts anybody. Up to half of the rows are kept back for them, so that
    running streams are speculated on while a long prompt is computed in chunks; and chunks beside
    them are small enough for the streams to keep moving.
    """

    def __init__(self, config: EngineConfig, cache: CacheManager) -> None:
        self._config = config
        self._cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request and give its pages back, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._cache.close(request.request_id)
        request.table = None

    def plan(self) -> StepPlan:
        """The next step, with all its pages reserved; empty if nothing can run."""
        planner = _Planner(self._config.max_batch_tokens)
        decoding = [request for request in self.running if request.num_pending == 1]
        computing = [request for request in self.running if request.num_pending > 1]
        for request in decoding:
            self._plan_running(request, planner)
        wanted = sum(request.draft_limits()[0] for request in decoding)
        held = min(wanted, planner.rows_left // 2)
        planner.rows_left -= held
        planner.prompt_rows_left = self._config.max_chunk_tokens if decoding else None
        for request in computing:
            if planner.takes_prompts:
                self._plan_running(request, planner)
        while self.waiting and planner.takes_prompts:
            if len(self.running) >= self._config.max_num_seqs or not self._admit(planner):
                break
        planner.rows_left += held
        for request in decoding:
            if request.request_id in planner.entries:
                self._allow_nodes(request, planner)
        return planner.plan()

    def _plan_running(self, request: Request, planner: _Planner) -> None:
        while request in self.running and not self._reserve(request, planner):
            victim = self.running[-1]
            self._preempt(victim)
            planner.drop(victim)

    def _admit(self, planner: _Planner) -> bool:
        """Start the first waiting request if its pending tokens fit in free pages."""
        # The other answers to a prompt that is being computed wait for it, and hold up nobody.
        request = next((r for r in self.waiting if not _waits_for_sibling(r)), None)
        if request is None:
            return False
        request.table = table = self._cache.open(request.request_id, request.params.cache_salt)
        cached = self._find_computed(request, table)
        # A page for each running stream stays free, or the newcomer would be preempted at once.
        needed = table.pages_needed(request.num_pending) + len(self.running)
        fits = needed <= self._cache.pool.num_free
        # Alone, a request may start with what there is: it fits, or it would have been refused.
        if (fits or not self.running) and self._reserve(request, planner):
            if request.stats.num_preemptions == 0:
                request.stats.num_cached_tokens = cached
            self.running.append(request)
            self.waiting.remove(request)
            return True
        self._cache.close(request.request_id)
        request.table = None
        return False

    def _find_computed(self, request: Request, table: BlockTable) -> int:
        """Take over pages that hold the request's first tokens; returns how many tokens."""
        if request.prompt_logprobs is not None and not request.prompt_logprobs.is_complete:
            return 0  # cached tokens have no logits
        if self._cache.prefix_cache:
            table.match_prefix(request.token_ids)
        donor = _prompt_donor(request)
        if donor is not None:
            # The last token is computed again: its logits are needed.
            reach = min(donor.num_computed, len(request.prompt_token_ids) - 1)
            if reach > table.num_committed:
                table.release()
                table.fork(donor.block_table, reach)
        return table.num_committed

    def _reserve(self, request: Request, planner: _Planner) -> bool:
        """Plan as many of the request's pending tokens as rows allow; False if pages are short."""
        assert request.table is not None
        num_pending = min(request.num_pending, planner.rows_left, planner.chunk_limit(request))
        if request.prompt_logprobs is not None and not request.prompt_logprobs.is_complete:
            num_pending = min(num_pending, _PROMPT_LOGPROBS_ROWS)
        try:
            copies = request.table.reserve(num_pending)
        except OutOfPagesError:
            return False
        is_judged = num_pending == request.num_pending
        planner.add(PlannedRequest(request, num_pending, is_judged, 0, 0), copies)
        return True

    def _allow_nodes(self, request: Request, planner: _Planner) -> None:
        """Let a planned request draft as far as its own limits, rows and free pages go."""
        assert request.table is not None
        entry = planner.entries[request.request_id]
        max_nodes, max_depth = request.draft_limits()
        max_nodes = min(max_nodes, planner.rows_left)
        free = self._cache.pool.num_free
        while max_nodes > 0 and request.table.pages_needed(entry.num_pending + max_nodes) > free:
            max_nodes -= 1
        if max_nodes > 0:
            request.table.reserve(entry.num_pending + max_nodes)
            planner.rows_left -= max_nodes
            planner.entries[request.request_id] = dataclasses.replace(
                entry, max_nodes=max_nodes, max_depth=max_depth
            )

    def _preempt(self, request: Request) -> None:
        self.remove(request)
        request.stats.num_preemptions += 1
        self.waiting.appendleft(request)


def _prompt_donor(request: Request) -> Request | None:
    """Of the running answers to the same prompt, the one that has computed most of it."""
    leader = request.leader or request
    running = [other for other in (leader, *leader.siblings) if other.table is not None]
    return max(
        (other for other in running if other is not request),
        key=lambda other: other.num_computed,
        default=None,
    )


def _waits_for_sibling(request: Request) -> bool:
    """Whether another answer to the same prompt is computing the prompt's KV just now."""
    donor = _prompt_donor(request)
    return donor is not None and donor.num_computed < len(request.prompt_token_ids) - 1


def _row_cost(request: Request) -> float:
    """What a row of the request costs, of what one without context does."""
    return 1.0 + request.num_computed / CHUNK_CONTEXT


class _Planner:
    """Collects the entries of one step, by request id and in order.

    rows_left: rows that the step may still have. prompt_rows_left: those of prompts, if limited, in
    rows without context; a row costs more the more tokens are before it.
    """

    def __init__(self, max_rows: int) -> None:
        self.rows_left = max_rows
        self.prompt_rows_left: float | None = None
        self.entries: dict[str, PlannedRequest] = {}
        self._copies: dict[str, list[tuple[int, int]]] = {}
        self._origin: dict[int, int] = {}

    @property
    def takes_prompts(self) -> bool:
        """Whether the step has room for rows of another prompt."""
        limit = self.prompt_rows_left
        return self.rows_left > 0 and (limit is None or limit >= 1)

    def chunk_limit(self, request: Request) -> int:
        """Rows that a request's chunk may have for the sake of running streams."""
        if self.prompt_rows_left is None:
            return self.rows_left
        # Few different sizes: CPU libraries compile, and keep, code for each shape they meet.
        multiple = round(self.prompt_rows_left / _row_cost(request) / MIN_CHUNK_TOKENS)
        return max(1, multiple) * MIN_CHUNK_TOKENS

    def add(self, entry: PlannedRequest, copies: list[tuple[int, int]]) -> None:
        self.entries[entry.request.request_id] = entry
        # Of a page that is itself still to be copied, what it will hold is copied.
        copies = [(self._origin.get(source, source), target) for source, target in copies]
        self._origin.update((target, source) for source, target in copies)
        self._copies[entry.request.request_id] = copies
        self.rows_left -= entry.num_pending
        if self.prompt_rows_left is not None:
            self.prompt_rows_left -= entry.num_pending * _row_cost(entry.request)

    def drop(self, request: Request) -> None:
        entry = self.entries.pop(request.request_id, None)
        if entry is not None:
            del self._copies[request.request_id]
            self.rows_left += entry.num_pending

    def plan(self) -> StepPlan:
        return StepPlan(
            tuple(self.entries.values()),
            tuple(copy for copies in self._copies.values() for copy in copies),
        )
