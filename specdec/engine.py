"""The engine: requests in, one step at a time, deltas out. Knows the order of a step."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdec.admission import Admission
from specdec.budget import CostTable
from specdec.cache import CacheManager, IntegrityError
from specdec.config import EngineConfig
from specdec.errors import InvalidRequestError, SpecdecError
from specdec.layout import lay_out
from specdec.metrics import EngineCounters, add_stats, zero_totals
from specdec.output import RequestDelta
from specdec.proposal import Proposer
from specdec.request import FinishReason, SamplingParams, Speculation
from specdec.request_state import Request
from specdec.runner import TargetRunner, flat_batch
from specdec.scheduler import Scheduler
from specdec.step import JudgedEntry, RowLogits, StepPlan, Verdict
from specdec.tokenizer import Tokenizer
from specdec.verify import walk
from specdec_drafts import Drafter, TokenTree
from specdec_kernels import TreeBatch

logger = logging.getLogger(__name__)

_WARM_UP_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


class EngineStoppedError(SpecdecError):
    """The engine's state could not be trusted after a failure; it does nothing any more."""


class Engine:
    """Continuous batching over one target: requests join and leave between any two steps.

    Not thread safe: one thread creates it and calls it.

    runner: the target; its KV tensors are allocated here. drafters: see specdec_drafts.
    eos_token_ids: tokens that end a request unless it ignores them. sampling_defaults: for fields
    that a request leaves unset. max_model_len is cut to what num_pages hold.
    """

    def __init__(
        self,
        runner: TargetRunner,
        drafters: Sequence[Drafter],
        config: EngineConfig,
        *,
        max_model_len: int,
        num_pages: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_model_len = min(max_model_len, num_pages * config.page_size)
        self.vocab_size = runner.vocab_size
        self.costs = CostTable()
        self._runner = runner
        self._admission = Admission(
            config,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            defaults=sampling_defaults or {},
        )
        self._cache = CacheManager(num_pages, config.page_size, prefix_cache=config.prefix_cache)
        runner.allocate(num_pages, config.page_size)
        self._scheduler = Scheduler(config, self._cache)
        self._proposer = Proposer(drafters, self.costs, self.vocab_size)
        self._requests: dict[str, Request] = {}
        self._num_passes = 0
        self._ended = dict.fromkeys(("finished", "aborted", "failed"), 0)
        self._totals = zero_totals()
        self._stopped: str | None = None

    # -- requests ---------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        speculation: Speculation | None = None,
    ) -> Request:
        """Queue a request and return its answer 0; it takes part from the next step on.

        Answers 1 .. n - 1 are its siblings. Deltas of all n carry request_id and their index.

        Raises InvalidRequestError naming the field: an empty or too long prompt, an id outside the
        vocabulary, a request id in use, something that needs a tokenizer without one, a grammar
        that does not compile, an unknown drafter.
        """
        self._raise_if_stopped()
        speculation = speculation or self.config.speculation
        self._proposer.check(speculation)
        if self._family(request_id):
            raise InvalidRequestError("request_id", f"{request_id!r} is already in use")
        answers = self._admission.requests(
            request_id, prompt_token_ids, params or SamplingParams(), speculation
        )
        for request in answers:
            if request.request_id in self._requests:
                raise InvalidRequestError("request_id", f"{request_id!r} is already in use")
        for request in answers:
            self._requests[request.request_id] = request
            self._scheduler.add(request)
        return answers[0]

    def abort(self, request_id: str) -> list[RequestDelta]:
        """End a request now and free its pages; returns the last delta of each answer that ran."""
        deltas = []
        for request in self._family(request_id):
            request.answer.finish(FinishReason.ABORT)
            self._close(request, "aborted")
            deltas.append(request.delta())
        return deltas

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._requests)

    # -- one step ---------------------------------------------------------------------------------

    def step(self) -> list[RequestDelta]:
        """One target pass: plan, propose, score, verify, commit; one delta for each judged request.

        A failure ends the requests of the step with delta.error if the pages add up afterwards.
        Raises EngineStoppedError if they do not, then and ever after.
        """
        self._raise_if_stopped()
        plan = self._scheduler.plan()
        if not plan.entries:
            return []
        deltas: list[RequestDelta] = []
        try:
            trees = self._proposer.propose(plan, self.config.max_batch_tokens)
            batch, judged = lay_out(plan, trees, self.config.page_size, self._runner.device)
            self._runner.kv.copy_pages(plan.page_copies)
            logits = self._runner.score(batch)
            self._num_passes += 1
            verdicts = self._verify(judged, trees, logits, deltas)
            self._commit(plan, verdicts)
            self._proposer.observe(verdicts)
            deltas += self._deliver(verdicts)
        except Exception as error:
            logger.exception("a step failed")
            deltas += self._fail([entry.request for entry in plan.entries], error)
        return deltas

    def _verify(
        self,
        judged: Sequence[JudgedEntry],
        trees: Mapping[str, TokenTree],
        logits: torch.Tensor,
        deltas: list[RequestDelta],
    ) -> dict[str, tuple[Request, Verdict]]:
        """Walk every judged request's tree; one whose walk fails ends alone, its delta appended."""
        verdicts: dict[str, tuple[Request, Verdict]] = {}
        for rows in judged:
            request, first = rows.entry.request, rows.first
            try:
                if request.prompt_logprobs is not None:
                    for row in RowLogits(logits[first : first + rows.num_prompt_rows]):
                        request.prompt_logprobs.add(row)
                if not rows.entry.is_judged:
                    continue
                tree = trees[request.request_id]
                first += rows.num_prompt_rows
                is_first = not request.answer.token_ids
                verdict = walk(request, tree, RowLogits(logits[first : first + tree.num_nodes]))
            except Exception as error:
                if not isinstance(error, InvalidRequestError):
                    logger.exception("request %s failed", request.request_id)
                if request.answer.token_ids:
                    request.stats.num_decode_passes += 1
                deltas += self._fail([request], error)
                continue
            verdicts[request.request_id] = (request, verdict)
            self._count(request, verdict, is_first=is_first)
        return verdicts

    def _count(self, request: Request, verdict: Verdict, *, is_first: bool) -> None:
        stats, now = request.stats, time.monotonic()
        if is_first:
            stats.first_token_time = now
        else:
            depth = max(verdict.tree.depths())
            stats.record_pass(verdict.tree.num_drafted, depth, len(verdict.path) - 1)
        stats.last_token_time = now
        stats.num_output_tokens = len(request.answer.token_ids)

    def _commit(self, plan: StepPlan, verdicts: Mapping[str, tuple[Request, Verdict]]) -> None:
        """Keep the KV of pending chunks and accepted paths; give the rest of the pages back."""
        moves: list[tuple[int, int]] = []
        counts: list[tuple[Request, int]] = []
        for entry in plan.entries:
            request = entry.request
            if request.table is None:  # its walk failed
                continue
            verdict = verdicts.get(request.request_id)
            if entry.num_pending > 1 or verdict is None:
                counts.append((request, entry.num_pending))
                if verdict is None and request.answer.token_ids:
                    request.stats.num_decode_passes += 1
            else:
                moves += self._path_moves(request, verdict[1].path)
                counts.append((request, len(verdict[1].path)))
        # Pages are published, and can be found by others, only once their KV is in place.
        self._runner.kv.compact(moves)
        for request, count in counts:
            self._commit_tokens(request, count)

    def _deliver(self, verdicts: Mapping[str, tuple[Request, Verdict]]) -> list[RequestDelta]:
        """The deltas of the step; requests that have ended are closed."""
        deltas = []
        for request, _ in verdicts.values():
            deltas.append(request.delta())
            if request.answer.finish_reason is not None:
                self._close(request, "finished")
        return deltas

    def _path_moves(self, request: Request, path: Sequence[int]) -> list[tuple[int, int]]:
        """(source, target) physical slots of the accepted nodes that are not in place yet."""
        table, first = request.block_table, request.num_computed
        moved = [(node, depth) for depth, node in enumerate(path) if node != depth]
        return [
            (table.slots(first + node, 1)[0], table.slots(first + depth, 1)[0])
            for node, depth in moved
        ]

    def _commit_tokens(self, request: Request, count: int) -> None:
        table = request.block_table
        table.commit(count)
        if self._cache.prefix_cache:
            table.publish(request.token_ids)

    def _fail(self, requests: Sequence[Request], error: Exception) -> list[RequestDelta]:
        """End these requests with an error. Raises EngineStoppedError if pages do not add up."""
        deltas = []
        for request in requests:
            if request.request_id in self._requests:
                if request.answer.finish_reason is None:
                    request.answer.finish(FinishReason.ABORT)
                request.stats.num_output_tokens = len(request.answer.token_ids)
                self._close(request, "failed")
                deltas.append(request.delta(error))
        try:
            self.check_integrity()
        except IntegrityError as broken:
            self._stopped = f"after {type(error).__name__}: {error}: {broken}"
            raise EngineStoppedError(f"the engine stopped {self._stopped}") from error
        return deltas

    def _close(self, request: Request, how: str) -> None:
        """Free what a request holds, and count it."""
        self._scheduler.remove(request)
        self._proposer.release(request.request_id)
        del self._requests[request.request_id]
        self._ended[how] += 1
        add_stats(self._totals, request.stats)

    # -- state ------------------------------------------------------------------------------------

    def reset_state(self) -> None:
        """Make the engine cold: drafts, calibration and prefix cache as new; measured costs stay.

        Raises SpecdecError while requests are running.
        """
        if self._requests:
            raise SpecdecError("reset_state needs an idle engine; abort or finish the requests")
        self._proposer.reset()
        self._cache.reset()

    def warm_up(self, repeats: int = 3) -> None:
        """Measure what a pass costs by number of rows; needs an idle engine, takes about a second.

        The first run of each size is not counted; the median of the others is.
        """
        committed = min(128, self.max_model_len - 2)
        pool, size = self._cache.pool, self.config.page_size
        limit = min(self.config.max_batch_tokens, pool.num_free * size - committed)
        sizes = [rows for rows in _WARM_UP_ROWS if rows <= limit]
        if committed < 1 or not sizes:
            return
        pages = pool.allocate(-(-(committed + sizes[-1]) // size))

        def run(rows: int) -> float:
            star = [-1] + [0] * (rows - 1)
            trees = TreeBatch.from_lists([star], [committed], [pages], size, self._runner.device)
            batch = flat_batch([0] * rows, trees, range(rows), self._runner.device)
            times = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                self._runner.score(batch)[-1, -1].item()
                times.append(1000 * (time.perf_counter() - start))
            return statistics.median(times[1:])

        try:
            self.costs.measure(run, sizes)
        finally:
            for page in reversed(pages):
                pool.release(page)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pages, tables and queues agree."""
        self._cache.check_integrity()
        live = {request.request_id for request in self._scheduler}
        if live != self._requests.keys():
            raise IntegrityError(f"queues hold {sorted(live)}, not {sorted(self._requests)}")
        for request in self._scheduler.running:
            if request.num_pending < 1:
                raise IntegrityError(f"request {request.request_id} has no token without KV")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return self._runner.bytes_per_slot

    @property
    def request_ids(self) -> set[str]:
        """Ids of the requests that run or wait."""
        return {(request.leader or request).request_id for request in self._requests.values()}

    def page_owners(self) -> dict[str, list[int]]:
        """Debug dump: the pages of every running request, in logical order."""
        return self._cache.page_owners()

    @property
    def counters(self) -> EngineCounters:
        """A snapshot of queues, pages and sums."""
        totals = dict(self._totals)
        for request in self._requests.values():
            add_stats(totals, request.stats)
        pool = self._cache.pool
        return EngineCounters(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_passes=self._num_passes,
            num_pages=pool.num_pages,
            num_free_pages=pool.num_free,
            num_used_pages=pool.num_used,
            num_cached_pages=pool.num_cached,
            num_finished=self._ended["finished"],
            num_aborted=self._ended["aborted"],
            num_failed=self._ended["failed"],
            **totals,
        )

    def _raise_if_stopped(self) -> None:
        if self._stopped is not None:
            raise EngineStoppedError(f"the engine stopped {self._stopped}")

    def _family(self, request_id: str) -> list[Request]:
        """The answers to a caller's request that still run or wait."""
        return [r for r in self._requests.values() if (r.leader or r).request_id == request_id]
