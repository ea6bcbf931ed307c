"""The protocol between the engine and a drafter, and the records that cross it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specdec_drafts.tree import TokenTree


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter may know of a request when it guesses.

    token_ids: prompt and output so far; the last one is the root of the tree to propose. Read only.
    num_prompt_tokens: how many of them are the prompt.
    max_nodes, max_depth: drafted nodes and depth beyond which nothing will be scored.
    temperature, seed: of the request's law, for drafters that share its noise.
    """

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    max_nodes: int
    max_depth: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What became of a tree.

    tree: the nodes that were scored. accepted: accepted node indices along the path, root first.
    emitted: the tokens the step emitted: the accepted drafted tokens and the bonus, or fewer if the
    request ended.
    """

    request_id: str
    tree: TokenTree
    accepted: Sequence[int]
    emitted: Sequence[int]


@runtime_checkable
class Drafter(Protocol):
    """Guesses continuations. A drafter never affects what is emitted, only how fast.

    propose returns one tree per request, in order, whose root is the request's last token; it may
    exceed the limits (the budget cuts), and a tree of one node means "no guess".
    observe is called once per scored tree, after its tokens were committed.
    release forgets a request that has ended; unknown ids are ignored.
    reset forgets everything learned: the drafter is as new.
    A drafter that speaks the ids of a tokenizer of its own has it in an attribute `tokenizer` (a
    fast transformers tokenizer): a target whose ids mean other strings is then refused at load.
    """

    @property
    def name(self) -> str: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]: ...

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def release(self, request_id: str) -> None: ...

    def reset(self) -> None: ...
