"""No draft: a draft of length zero, which makes plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_drafts.base import DraftRequest, Observation
from specdec_drafts.tree import TokenTree, root_only


class NoDrafter:
    """Proposes nothing."""

    name = "none"

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [root_only(request.token_ids[-1]) for request in requests]

    def observe(self, observations: Sequence[Observation]) -> None:
        pass

    def release(self, request_id: str) -> None:
        pass

    def reset(self) -> None:
        pass
