"""Block tables of all requests over one pool, and the proof that no page is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from specdec.cache.block_table import BlockTable
from specdec.cache.pages import IntegrityError, PagePool


class CacheManager:
    """Hands out block tables and checks that free, cached and used pages add up.

    namespace: what KV depends on besides the tokens (model, dtype, adapter); two engines with
    different namespaces never share a page.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_cache: bool, namespace: Hashable = ()
    ) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._namespace = ("namespace", namespace)
        self._tables: dict[str, BlockTable] = {}

    def open(self, request_id: str, salt: str | None = None) -> BlockTable:
        """A new, empty block table for a request that has none.

        salt: cached pages are shared only among tables of the same salt.
        """
        assert request_id not in self._tables
        table = BlockTable(self.pool, self.page_size, (self._namespace, salt))
        self._tables[request_id] = table
        return table

    def close(self, request_id: str) -> None:
        """Release a request's pages and forget its table; unknown ids are ignored."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            table.release()

    def reset(self) -> None:
        """Forget cached content. Raises IntegrityError while a request holds pages."""
        if self._tables:
            raise IntegrityError("the cache can only be reset while no request runs")
        self.pool.drop_cached()

    def page_owners(self) -> dict[str, list[int]]:
        """Debug dump: the pages of every request, in logical order."""
        return {request_id: list(table.pages) for request_id, table in self._tables.items()}

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every page is free, cached or owned as counted."""
        owners: Counter[int] = Counter()
        for request_id, table in self._tables.items():
            if len(set(table.pages)) != len(table.pages):
                raise IntegrityError(f"request {request_id} holds a page twice")
            if table.num_committed > table.num_slots:
                raise IntegrityError(f"request {request_id} has more tokens than slots")
            owners.update(table.pages)
        self.pool.check_integrity(owners)
