"""From the drafters' guesses to the trees that a step scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec.budget import Calibration, Candidate, CostTable, cut, principal_first
from specdec.errors import InvalidRequestError
from specdec.request import Speculation, SpeculationMode
from specdec.request_state import Request
from specdec.step import PlannedRequest, StepPlan, Verdict
from specdec_drafts import Drafter, DraftRequest, Observation, TokenTree, root_only


class Proposer:
    """Owns the drafters and their calibration; asks, cuts over the whole batch, and reports back.

    A request is drafted for by the first drafter its Speculation allows.
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
            request_id = entry.request.request_id
            drafter, tree = proposals[request_id]
            by_cost = entry.request.speculation.mode is SpeculationMode.AUTO
            survival = self._calibration.survival(drafter, tree)
            candidates.append(Candidate(tree, survival, entry.max_nodes, entry.max_depth, by_cost))
        base_rows = sum(entry.num_pending for entry in plan.entries)
        cut(
            candidates,
            base_rows=base_rows,
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
        for drafter in self._drafters:
            mine = [
                (request, verdict)
                for request, verdict in verdicts.values()
                if self._drafter_of(request) is drafter
            ]
            for _, verdict in mine:
                self._calibration.observe(drafter.name, verdict)
            if mine:
                drafter.observe(
                    [
                        Observation(request.request_id, v.tree, tuple(v.path), tuple(v.emitted))
                        for request, v in mine
                    ]
                )

    def release(self, request_id: str) -> None:
        """A request has ended."""
        for drafter in self._drafters:
            drafter.release(request_id)

    def reset(self) -> None:
        """Forget everything learned."""
        self._calibration.reset()
        for drafter in self._drafters:
            drafter.reset()

    def _drafter_of(self, request: Request) -> Drafter | None:
        allowed = request.speculation.drafts
        for drafter in self._drafters:
            if allowed is None or drafter.name in allowed:
                return drafter
        return None

    def _ask(self, entries: Sequence[PlannedRequest]) -> dict[str, tuple[str, TokenTree]]:
        """Drafter name and proposed tree by request id; one call a drafter."""
        proposals: dict[str, tuple[str, TokenTree]] = {}
        for drafter in self._drafters:
            mine = [entry for entry in entries if self._drafter_of(entry.request) is drafter]
            if not mine:
                continue
            trees = drafter.propose([_draft_request(entry) for entry in mine])
            for entry, tree in zip(mine, trees, strict=True):
                self._check_tree(drafter.name, entry.request, tree)
                proposals[entry.request.request_id] = (drafter.name, tree)
        for entry in entries:
            request = entry.request
            proposals.setdefault(request.request_id, ("none", root_only(request.token_ids[-1])))
        return proposals

    def _check_tree(self, drafter: str, request: Request, tree: TokenTree) -> None:
        tree.check(self._vocab_size)
        if tree.token_ids[0] != request.token_ids[-1]:
            raise ValueError(
                f"drafter {drafter}: root {tree.token_ids[0]} is not the last token "
                f"{request.token_ids[-1]} of request {request.request_id}"
            )


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
