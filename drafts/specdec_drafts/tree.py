"""Token trees: the one record every drafter produces and the target scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A tree of guessed continuations of one request. Node 0 is the root.

    token_ids: [N] token of each node; the root's is the request's last token.
    parents: [N] node index of each node's parent, smaller than its own; -1 for the root.
    probs: [N] the drafter's estimate that a node is accepted given that its parent is, in (0, 1];
        1.0 for the root.
    buckets: [N] calibration class of each estimate (any small int of the drafter's choosing).

    Siblings carry different tokens.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    probs: Sequence[float]
    buckets: Sequence[int]

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, the root included."""
        return len(self.token_ids)

    @property
    def num_drafted(self) -> int:
        """Nodes of the tree but the root."""
        return len(self.token_ids) - 1

    def depths(self) -> list[int]:
        """[N] distance of each node from the root."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def check(self, vocab_size: int | None = None) -> None:
        """Raise ValueError unless the tree obeys this class's rules (vocab_size bounds the ids)."""
        length = len(self.token_ids)
        if length == 0 or self.parents[0] != -1:
            raise ValueError("a tree needs a root: node 0 with parent -1")
        if not len(self.parents) == len(self.probs) == len(self.buckets) == length:
            raise ValueError("token_ids, parents, probs and buckets must have one entry a node")
        seen: set[tuple[int, int]] = set()
        for node in range(1, length):
            edge = (self.parents[node], self.token_ids[node])
            if not 0 <= edge[0] < node:
                raise ValueError(f"node {node}: parent {edge[0]} is not an earlier node")
            if edge in seen:
                raise ValueError(f"node {node}: sibling with the same token {edge[1]}")
            if vocab_size is not None and not 0 <= edge[1] < vocab_size:
                raise ValueError(f"node {node}: token {edge[1]} is outside 0..{vocab_size - 1}")
            if not 0.0 < self.probs[node] <= 1.0:
                raise ValueError(f"node {node}: probability {self.probs[node]} is outside (0, 1]")
            seen.add(edge)

    def select(self, keep: Sequence[int]) -> TokenTree:
        """The subtree of the nodes in keep (root first, parents before children), renumbered."""
        new_index = {node: index for index, node in enumerate(keep)}
        return TokenTree(
            [self.token_ids[node] for node in keep],
            [-1 if node == 0 else new_index[self.parents[node]] for node in keep],
            [self.probs[node] for node in keep],
            [self.buckets[node] for node in keep],
        )


def root_only(token_id: int) -> TokenTree:
    """The tree of one node: plain decoding."""
    return TokenTree([token_id], [-1], [1.0], [0])


class TreeBuilder:
    """Grows a TokenTree; a sibling that is there already is reused, with its larger estimate."""

    def __init__(self, root_token_id: int) -> None:
        self._token_ids = [root_token_id]
        self._parents = [-1]
        self._probs = [1.0]
        self._buckets = [0]
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, parent: int, token_id: int, prob: float, bucket: int = 0) -> int:
        """Add a child of node `parent`; returns its index, or that of an equal sibling."""
        key = (parent, token_id)
        node = self._children.get(key)
        if node is None:
            node = len(self._token_ids)
            self._children[key] = node
            self._token_ids.append(token_id)
            self._parents.append(parent)
            self._probs.append(prob)
            self._buckets.append(bucket)
        elif prob > self._probs[node]:
            self._probs[node] = prob
            self._buckets[node] = bucket
        return node

    def merge(self, tree: TokenTree, bucket_offset: int = 0) -> None:
        """Add all nodes of a tree with the same root; bucket_offset is added to its buckets."""
        here = [0] * tree.num_nodes
        for node in range(1, tree.num_nodes):
            here[node] = self.add(
                here[tree.parents[node]],
                tree.token_ids[node],
                tree.probs[node],
                tree.buckets[node] + bucket_offset,
            )

    def build(self) -> TokenTree:
        """The tree grown so far."""
        return TokenTree(self._token_ids, self._parents, self._probs, self._buckets)
