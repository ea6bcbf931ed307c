"""The ragged description of one flat step, shared by every operation of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec_kernels.tree_layout.api import (
    WORD_BITS,
    TreeLayout,
    most_private_nodes,
    tree_layout,
)

MAX_PAGE_SIZE = 128


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """R requests with S rows in all: who owns which row, what it may see, where its KV lies.

    Node i of a request with L committed tokens lives at logical slot L + i, which is physical slot
    `block_table[(L + i) // page_size] * page_size + (L + i) % page_size`; its logical position is
    L + depth. All tensors lie on the device of the KV cache. Fields that end in `_host` are Python
    copies, so that host code never waits for a device.

    cu_nodes: int32 [R + 1], prefix sums of rows per request. committed_lens: int32 [R].
    block_tables: int32 [R, P], page ids, 0 past what L + rows needs. depths: int32 [S].
    ancestors: int64 [S, W] used as unsigned bit words, W = 1..4: bit j is set exactly if node j of
    the same request is the row's own node or one of its ancestors; meaningless for chains.
    is_chain: bool [R]; row i of a chain sees rows 0..i, and a chain may have any length.
    block_tables_host: exactly the pages that hold L + rows slots. private_nodes_host: the most
    nodes of one path that are not stored where they would be committed, 0 for chains.
    """

    cu_nodes: Tensor
    committed_lens: Tensor
    block_tables: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    is_chain: Tensor
    page_size: int
    cu_nodes_host: list[int]
    committed_lens_host: list[int]
    block_tables_host: list[list[int]]
    is_chain_host: list[bool]
    private_nodes_host: list[int]

    @classmethod
    def from_lists(
        cls,
        parents: Sequence[Sequence[int] | int],
        committed_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> TreeBatch:
        """Builds the description from Python lists, one entry per request.

        parents: a tree as parent indices (`parents[0] == -1`, parents before children, at most 256
        nodes), or an int n for a chain of n rows. block_tables: page ids, at least as many as
        L + rows slots need; further ones are dropped.

        Raises ValueError naming the request (and node) if lengths disagree, a tree is malformed, a
        length is negative, a block table is too short, or page_size is not a power of two in
        1..128.
        """
        _check_lists(parents, committed_lens, block_tables, page_size)
        layouts = [
            None if isinstance(p, int) else tree_layout(p, request=r) for r, p in enumerate(parents)
        ]
        rows = [p if isinstance(p, int) else len(p) for p in parents]
        widest = max((n for n, tree in zip(rows, layouts, strict=True) if tree), default=1)
        num_words = -(-widest // WORD_BITS)
        tables = _exact_tables(rows, committed_lens, block_tables, page_size)
        width = max((len(t) for t in tables), default=0) or 1
        cu_nodes = [0]
        for n in rows:
            cu_nodes.append(cu_nodes[-1] + n)
        depths, words = _flatten(rows, layouts, num_words)

        def tensor(data: object, dtype: torch.dtype) -> Tensor:
            return torch.tensor(data, dtype=dtype).to(device)

        return cls(
            cu_nodes=tensor(cu_nodes, torch.int32),
            committed_lens=tensor(list(committed_lens), torch.int32),
            block_tables=tensor([t + [0] * (width - len(t)) for t in tables], torch.int32).view(
                len(tables), width
            ),
            parents=tensor(
                [n for p in parents for n in (range(-1, p - 1) if isinstance(p, int) else p)],
                torch.int32,
            ),
            depths=tensor(depths, torch.int32),
            ancestors=tensor(words, torch.int64).view(len(depths), num_words),
            is_chain=tensor([tree is None for tree in layouts], torch.bool),
            page_size=page_size,
            cu_nodes_host=cu_nodes,
            committed_lens_host=list(committed_lens),
            block_tables_host=tables,
            is_chain_host=[tree is None for tree in layouts],
            private_nodes_host=[
                0 if tree is None or isinstance(p, int) else most_private_nodes(p, tree.depths)
                for p, tree in zip(parents, layouts, strict=True)
            ],
        )

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.committed_lens_host)

    @property
    def num_rows(self) -> int:
        """S, the rows of all requests together."""
        return self.cu_nodes_host[-1]

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.cu_nodes.device

    @cached_property
    def row_requests(self) -> Tensor:
        """int64 [S]: the request that owns each row."""
        counts = (self.cu_nodes[1:] - self.cu_nodes[:-1]).long()
        owners = torch.arange(self.num_requests, device=self.device)
        return torch.repeat_interleave(owners, counts, output_size=self.num_rows)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [S]: the logical position L + depth of each row."""
        return (self.committed_lens[self.row_requests] + self.depths).long()

    @cached_property
    def slots(self) -> Tensor:
        """int64 [S]: the physical slot in which each row's key and value belong."""
        owners = self.row_requests
        first = (self.committed_lens - self.cu_nodes[:-1]).long()
        logical = first[owners] + torch.arange(self.num_rows, device=self.device)
        shift = self.page_size.bit_length() - 1
        pages = self.block_tables[owners, logical >> shift].long()
        return (pages << shift) + (logical & (self.page_size - 1))

    def lane_slots(self, num_lanes: int) -> Tensor:
        """int32 [S, num_lanes]: the physical slot of what each row sees at position P - lane.

        Lane 0 is the row itself, the next ones its ancestors, then committed tokens; -1 where there
        is no such position.
        """
        owners = self.row_requests
        start, committed = self.cu_nodes[owners].long(), self.committed_lens[owners].long()
        node = torch.arange(self.num_rows, device=self.device) - start
        logical = []
        for lane in range(num_lanes):
            logical.append(torch.where(node >= 0, committed + node, self.positions - lane))
            above = self.parents[start + node.clamp(min=0)].long()
            node = torch.where(node >= 0, above, node)
        lanes = torch.stack(logical, dim=1)
        shift = self.page_size.bit_length() - 1
        seen = lanes.clamp(min=0)
        pages = self.block_tables[owners.unsqueeze(1), seen >> shift].long()
        slots = (pages << shift) + (seen & (self.page_size - 1))
        return torch.where(lanes >= 0, slots, -1).int()


def _check_lists(
    parents: Sequence[Sequence[int] | int],
    committed_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    page_size: int,
) -> None:
    if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(
            f"page_size: must be a power of two in 1..{MAX_PAGE_SIZE}, got {page_size}"
        )
    if not len(parents) == len(committed_lens) == len(block_tables):
        raise ValueError(
            "parents, committed_lens and block_tables need one entry per request, got "
            f"{len(parents)}, {len(committed_lens)} and {len(block_tables)}"
        )
    for request, (tree, length) in enumerate(zip(parents, committed_lens, strict=True)):
        if isinstance(tree, int) and tree < 0:
            raise ValueError(f"request {request}: a chain has 0 or more rows, got {tree}")
        if length < 0:
            raise ValueError(f"request {request}: committed_lens must be 0 or more, got {length}")


def _exact_tables(
    rows: list[int],
    committed_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    page_size: int,
) -> list[list[int]]:
    tables = []
    for request, (n, length, table) in enumerate(
        zip(rows, committed_lens, block_tables, strict=True)
    ):
        needed = -(-(length + n) // page_size)
        if len(table) < needed:
            raise ValueError(
                f"request {request}: block table has {len(table)} pages, but {length} committed "
                f"tokens and {n} rows need {needed} of size {page_size}; reserve pages first"
            )
        pages = list(table[:needed])
        if pages and min(pages) < 0:
            raise ValueError(f"request {request}: block table holds a negative page id")
        tables.append(pages)
    return tables


def _flatten(
    rows: list[int], layouts: list[TreeLayout | None], num_words: int
) -> tuple[list[int], list[list[int]]]:
    depths: list[int] = []
    words: list[list[int]] = []
    for n, layout in zip(rows, layouts, strict=True):
        if layout is None:
            depths.extend(range(n))
            words.extend([[0] * num_words] * n)
        else:
            depths.extend(layout.depths)
            words.extend(layout.ancestor_words(num_words))
    return depths, words
