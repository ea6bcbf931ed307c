"""From the drafters' guesses to the trees that a step scores."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from specdec.budget import Calibration, Candidate, CostTable, cut, principal_first
from specdec.errors import InvalidRequestError
from specdec.request import Speculation, SpeculationMode
from specdec.request_state import Request
from specdec.step import PlannedRequest, StepPlan, Verdict
from specdec_drafts import (
    Drafter,
    DraftRequest,
    Observation,
    TokenTree,
    TreeBuilder,
    root_only,
)

logger = logging.getLogger(__name__)

_BUCKETS = 1 << 20
"""Calibration buckets set apart for each drafter."""


class Proposer:
    """Owns the drafters and their calibration; asks, cuts over the whole batch, and reports back.

    A request is drafted for by all drafters that its Speculation allows; their trees are merged.
    What is emitted does not depend on drafters, so a drafter that fails is logged and passed over.
    """

    def __init__(self, drafters: Sequence[Drafter], costs: CostTable, vocab_size: int) -> None:
        self._drafters = list(drafters)
        self._costs = costs
        self._vocab_size = vocab_size
        self._calibration = Calibration()

    @property
    def names(self) -> list[str]:
        """Names of the drafters."""
        return [drafter.name for drafter in self._drafters]

    def check(self, speculation: Speculation) -> None:
        """Raise InvalidRequestError if a request names a drafter that is not loaded."""
        for name in speculation.drafts or ():
            if name not in self.names:
                raise InvalidRequestError(
                    "speculation.drafts", f"{name!r} is not loaded; there are {self.names}"
                )

    def propose(self, plan: StepPlan, max_rows: int) -> dict[str, TokenTree]:
        """The tree of every request whose root is judged, by request id."""
        trees = {
            entry.request.request_id: root_only(entry.request.token_ids[-1])
            for entry in plan.entries
            if entry.is_judged
        }
        wanting = [entry for entry in plan.entries if entry.max_nodes > 0]
        proposals = self._ask(wanting)
        candidates = []
        for entry in wanting:
            tree = proposals[entry.request.request_id]
            by_cost = entry.request.speculation.mode is SpeculationMode.AUTO
            survival = self._calibration.survival(tree)
            candidates.append(Candidate(tree, survival, entry.max_nodes, entry.max_depth, by_cost))
        cut(
            candidates,
            base_rows=sum(entry.num_pending for entry in plan.entries),
            num_judged=len(trees),
            max_rows=max_rows,
            costs=self._costs,
        )
        for entry, candidate in zip(wanting, candidates, strict=True):
            order = principal_first(candidate.tree, candidate.kept, candidate.survival)
            trees[entry.request.request_id] = candidate.tree.select(order)
        return trees

    def observe(self, verdicts: Mapping[str, tuple[Request, Verdict]]) -> None:
        """Calibrate on, and tell the drafters, what became of each tree."""
        for _, verdict in verdicts.values():
            self._calibration.observe(verdict)
        for drafter in self._drafters:
            observations = [
                Observation(request.request_id, v.tree, tuple(v.path), tuple(v.emitted))
                for request, v in verdicts.values()
                if _allows(request, drafter)
            ]
            if observations:
                with _passed_over(drafter):
                    drafter.observe(observations)

    def release(self, request_id: str) -> None:
        """A request has ended."""
        for drafter in self._drafters:
            with _passed_over(drafter):
                drafter.release(request_id)

    def reset(self) -> None:
        """Forget everything learned."""
        self._calibration.reset()
        for drafter in self._drafters:
            drafter.reset()

    def _ask(self, entries: Sequence[PlannedRequest]) -> dict[str, TokenTree]:
        """The merged tree of each request, by request id; one call a drafter."""
        builders = {
            entry.request.request_id: TreeBuilder(entry.request.token_ids[-1]) for entry in entries
        }
        for index, drafter in enumerate(self._drafters):
            mine = [entry for entry in entries if _allows(entry.request, drafter)]
            if not mine:
                continue
            with _passed_over(drafter):
                trees = drafter.propose([_draft_request(entry) for entry in mine])
                for entry, tree in zip(mine, trees, strict=True):
                    tree = _without_unknown_ids(tree, self._vocab_size)
                    self._check_tree(entry.request, tree)
                    # Buckets of different drafters are calibrated apart.
                    builders[entry.request.request_id].merge(tree, index * _BUCKETS)
        return {
            entry.request.request_id: _pruned(
                entry.request, builders[entry.request.request_id].build()
            )
            for entry in entries
        }

    def _check_tree(self, request: Request, tree: TokenTree) -> None:
        tree.check(self._vocab_size)
        if tree.token_ids[0] != request.token_ids[-1]:
            raise ValueError(
                f"root {tree.token_ids[0]} is not the last token {request.token_ids[-1]} of "
                f"request {request.request_id}"
            )


def _pruned(request: Request, tree: TokenTree) -> TokenTree:
    """The tree without what the request's grammar forbids; an economy that must fail nobody."""
    try:
        return request.law.prune(tree)
    except Exception:
        logger.exception("the tree of request %s is not pruned", request.request_id)
        return tree


def _without_unknown_ids(tree: TokenTree, vocab_size: int) -> TokenTree:
    """The tree without ids past the target's vocabulary, which a padded draft model may guess.

    What hangs below such a node goes with it.
    """
    if max(tree.token_ids) < vocab_size:
        return tree
    kept = [0]
    for node in range(1, tree.num_nodes):
        if tree.parents[node] in kept and tree.token_ids[node] < vocab_size:
            kept.append(node)
    return tree.select(kept)


def _allows(request: Request, drafter: Drafter) -> bool:
    allowed = request.speculation.drafts
    return allowed is None or drafter.name in allowed


@contextlib.contextmanager
def _passed_over(drafter: Drafter) -> Iterator[None]:
    """Log what a drafter raises and go on without it."""
    try:
        yield
    except Exception:
        logger.exception("drafter %s failed and is passed over in this step", drafter.name)


def _draft_request(entry: PlannedRequest) -> DraftRequest:
    request = entry.request
    assert request.params.temperature is not None
    return DraftRequest(
        request.request_id,
        request.token_ids,
        len(request.prompt_token_ids),
        entry.max_nodes,
        entry.max_depth,
        request.params.temperature,
        request.seed,
    )
