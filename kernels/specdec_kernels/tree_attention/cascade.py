"""Finds requests that share leading pages, so that what they share is read once for all of them."""

from __future__ import annotations

from typing import NamedTuple

from specdec_kernels.batch import TreeBatch


class SharedPrefix(NamedTuple):
    """Requests, in ascending order, whose block tables agree in the first `parts` parts."""

    requests: list[int]
    parts: int


def shared_prefixes(batch: TreeBatch, split: int) -> list[SharedPrefix]:
    """Groups of at least two requests that share at least one part of `split` committed slots.

    A request is in at most one group. Of the ways to group them, the one that saves most reading is
    taken first, then the next among the requests that are left.
    """
    pages = max(1, split // batch.page_size)
    # (identity of the prefix so far) -> requests, part by part while somebody shares.
    counts = batch.cu_nodes_host
    alive = {
        0: [r for r in range(batch.num_requests) if counts[r + 1] > counts[r]],
    }
    candidates: list[SharedPrefix] = []
    for part in range(max(batch.committed_lens_host, default=0) // split):
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for prefix, requests in alive.items():
            for request in requests:
                if batch.committed_lens_host[request] < (part + 1) * split:
                    continue
                table = batch.block_tables_host[request]
                key = (prefix, tuple(table[part * pages : (part + 1) * pages]))
                groups.setdefault(key, []).append(request)
        shared = [requests for requests in groups.values() if len(requests) > 1]
        if not shared:
            break
        candidates += [SharedPrefix(requests, part + 1) for requests in shared]
        alive = dict(enumerate(shared))
    return _best(candidates)


def _best(candidates: list[SharedPrefix]) -> list[SharedPrefix]:
    chosen: list[SharedPrefix] = []
    taken: set[int] = set()
    while True:
        candidates = [
            SharedPrefix([r for r in requests if r not in taken], parts)
            for requests, parts in candidates
        ]
        candidates = [c for c in candidates if len(c.requests) > 1]
        if not candidates:
            return chosen
        best = max(candidates, key=lambda c: (len(c.requests) - 1) * c.parts)
        chosen.append(best)
        taken.update(best.requests)
