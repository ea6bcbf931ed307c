"""Shape of one request's tree: where every node stands and which nodes it may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_TREE_NODES = 256
WORD_BITS = 64
_WORD_MASK = (1 << WORD_BITS) - 1


class TreeLayout(NamedTuple):
    """Depth and ancestor set of every node of one tree.

    `depths[i]` is the number of edges from the root to node i. `ancestor_bits[i]` is a plain int of
    unbounded width whose bit j is set exactly if node j is node i or one of its ancestors.
    """

    depths: list[int]
    ancestor_bits: list[int]

    def ancestor_words(self, num_words: int) -> list[list[int]]:
        """The ancestor sets as rows of `num_words` signed 64-bit ints, lowest bits first.

        The words are unsigned bit patterns stored in signed ints because torch has no complete
        unsigned 64-bit type.
        """
        if num_words == 1:
            return [[_signed(bits)] for bits in self.ancestor_bits]
        shifts = range(0, num_words * WORD_BITS, WORD_BITS)
        return [[_signed((bits >> s) & _WORD_MASK) for s in shifts] for bits in self.ancestor_bits]


def tree_layout(
    parents: Sequence[int], *, request: int = 0, principal_first: bool = False
) -> TreeLayout:
    """Turns parent indices into depths and ancestor sets.

    parents: `parents[0] == -1` is the root; every other node names an earlier node of the same
    tree; 1 to 256 nodes. request: only used to name the request in errors. principal_first: also
    require that nodes 0, 1, .. down to a leaf are the principal path (`principal_path_length`).

    Raises ValueError that names request and node if the parents are not such a tree.
    """
    num_nodes = len(parents)
    if not 1 <= num_nodes <= MAX_TREE_NODES:
        raise ValueError(
            f"request {request}: a tree has 1 to {MAX_TREE_NODES} nodes, got {num_nodes}; "
            "cut the tree, or pass a chain as its row count"
        )
    if parents[0] != -1:
        raise ValueError(f"request {request}, node 0: the root's parent is -1, got {parents[0]}")
    depths = [0] * num_nodes
    bits = [1] * num_nodes
    for node in range(1, num_nodes):
        parent = parents[node]
        if not 0 <= parent < node:
            raise ValueError(
                f"request {request}, node {node}: parent {parent} is not an earlier node; "
                f"it must lie in 0..{node - 1} (parents are numbered before their children)"
            )
        depths[node] = depths[parent] + 1
        bits[node] = bits[parent] | (1 << node)
    if principal_first:
        principal_path_length(parents, request=request)
    return TreeLayout(depths, bits)


def principal_path_length(parents: Sequence[int], *, request: int = 0) -> int:
    """Number of nodes on the principal path, which is numbered 0, 1, .. from root to leaf.

    If that path is accepted, its keys and values already lie where they belong and a commit moves
    nothing. Raises ValueError naming request and node if the path 0, 1, .. stops above a leaf.
    """
    last = 0
    while last + 1 < len(parents) and parents[last + 1] == last:
        last += 1
    for node in range(last + 1, len(parents)):
        if parents[node] == last:
            raise ValueError(
                f"request {request}, node {node}: it continues the principal path, which ends at "
                f"node {last}, but is not node {last + 1}; number the principal path first"
            )
    return last + 1


def most_private_nodes(parents: Sequence[int], depths: Sequence[int]) -> int:
    """The most nodes of one path that are not stored where they would be committed.

    Node i is stored at slot L + i and committed to slot L + depth: it is private if the two differ.
    Parents stand before their children, so all nodes below a private one are private too.
    """
    private = [0] * len(parents)
    for node in range(1, len(parents)):
        if node != depths[node]:
            private[node] = private[parents[node]] + 1
    return max(private)


def _signed(word: int) -> int:
    return word - (1 << WORD_BITS) if word >> (WORD_BITS - 1) else word
