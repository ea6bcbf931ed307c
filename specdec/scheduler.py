"""Who takes part in a step: admission, chunks, node allowances, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from specdec.cache import CacheManager, OutOfPagesError
from specdec.config import EngineConfig
from specdec.request_state import Request
from specdec.step import PlannedRequest, StepPlan


class Scheduler:
    """Owns the queues and reserves the pages of every step.

    Running requests come first, those that only decode before those with more pending tokens, the
    oldest first; then waiting ones join for as long as rows, pages and places are left. A step
    never holds more than max_batch_tokens rows, so a long prompt is computed in chunks beside the
    running streams. When pages run out, node allowances shrink first, then the youngest request is
    preempted: its pages go, its tokens stay, and it is computed again from the front of the queue.
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
        for index, request in enumerate(decoding):
            # Trees may not take the row that each of the later streams needs.
            planner.rows_held = len(decoding) - index - 1
            self._plan_running(request, planner)
        for request in computing:
            if planner.rows_left > 0:
                self._plan_running(request, planner)
        while self.waiting and planner.rows_left > 0:
            if len(self.running) >= self._config.max_num_seqs or not self._admit(planner):
                break
        return planner.plan()

    def _plan_running(self, request: Request, planner: _Planner) -> None:
        while request in self.running and not self._reserve(request, planner):
            victim = self.running[-1]
            self._preempt(victim)
            planner.drop(victim)

    def _admit(self, planner: _Planner) -> bool:
        """Start the first waiting request if its pending tokens fit in free pages."""
        request = self.waiting[0]
        table = self._cache.open(request.request_id)
        if self._cache.prefix_cache:
            cached = table.match_prefix(request.token_ids)
            if not request.answer.token_ids:
                request.stats.num_cached_tokens = min(cached, request.stats.num_prompt_tokens)
        request.table = table
        # A page for each running stream stays free, or the newcomer would be preempted at once.
        needed = table.pages_needed(request.num_pending) + len(self.running)
        fits = needed <= self._cache.pool.num_free
        # Alone, a request may start with what there is: it fits, or it would have been refused.
        if (fits or not self.running) and self._reserve(request, planner):
            self.running.append(request)
            self.waiting.popleft()
            return True
        self._cache.close(request.request_id)
        request.table = None
        return False

    def _reserve(self, request: Request, planner: _Planner) -> bool:
        """Plan the request with as many rows as rows and pages allow; False if not even one."""
        assert request.table is not None
        num_pending = min(request.num_pending, planner.rows_left)
        max_nodes, max_depth = request.draft_limits()
        max_nodes = max(0, min(max_nodes, planner.rows_left - planner.rows_held - num_pending))
        free = self._cache.pool.num_free
        while max_nodes > 0 and request.table.pages_needed(num_pending + max_nodes) > free:
            max_nodes -= 1
        try:
            copies = request.table.reserve(num_pending + max_nodes)
        except OutOfPagesError:
            return False
        is_judged = num_pending == request.num_pending
        planner.add(PlannedRequest(request, num_pending, is_judged, max_nodes, max_depth), copies)
        return True

    def _preempt(self, request: Request) -> None:
        self.remove(request)
        request.stats.num_preemptions += 1
        self.waiting.appendleft(request)


class _Planner:
    """Collects the entries of one step."""

    def __init__(self, max_rows: int) -> None:
        self.rows_left = max_rows
        self.rows_held = 0
        self._entries: list[tuple[PlannedRequest, list[tuple[int, int]]]] = []

    def add(self, entry: PlannedRequest, copies: list[tuple[int, int]]) -> None:
        self._entries.append((entry, copies))
        self.rows_left -= entry.num_pending + entry.max_nodes

    def drop(self, request: Request) -> None:
        for item in [item for item in self._entries if item[0].request is request]:
            self._entries.remove(item)
            self.rows_left += item[0].num_pending + item[0].max_nodes

    def plan(self) -> StepPlan:
        return StepPlan(
            tuple(entry for entry, _ in self._entries),
            tuple(copy for _, copies in self._entries for copy in copies),
        )
