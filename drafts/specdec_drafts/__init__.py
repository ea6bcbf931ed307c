"""How tokens are guessed: drafters, their protocol and their trees."""

from specdec_drafts.base import Drafter, DraftRequest, Observation
from specdec_drafts.registry import available_drafters, make_drafters
from specdec_drafts.tree import TokenTree, TreeBuilder, root_only

__all__ = [
    "DraftRequest",
    "Drafter",
    "Observation",
    "TokenTree",
    "TreeBuilder",
    "available_drafters",
    "make_drafters",
    "root_only",
]
