"""The meaning of compact_kv and copy_pages, in plain torch; also the CPU form."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def reference_move(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copies entries `src` of dimension 1 to `dst` in every cache; all reads precede all writes."""
    for cache in caches:
        cache.index_copy_(1, dst, cache.index_select(1, src))
