"""The page pool: which pages are free, used, shared, or kept for their content."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from specdec.errors import SpecdecError


class OutOfPagesError(SpecdecError):
    """More pages were asked for than are free; nothing was changed."""


class IntegrityError(SpecdecError):
    """The cache's books do not add up: the engine must stop."""


@dataclass(frozen=True, slots=True)
class CachedPage:
    """Content of a full, committed page: its tokens after a given parent content.

    key: (id of the parent's CachedPage or the namespace, tokens of the page). Equality of keys is
    equality of whole prefixes, so a collision is impossible.
    """

    content_id: int
    page: int
    key: tuple[Hashable, tuple[int, ...]]


class PagePool:
    """Owns the state of every page: free, used (reference count), or cached (content, unused).

    A cached page is free for the asking: the least recently released one goes first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # a heap: low ids first keeps tables contiguous
        self._ref_counts = [0] * num_pages
        self._content: dict[int, CachedPage] = {}
        self._by_key: dict[tuple[Hashable, tuple[int, ...]], CachedPage] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ids = itertools.count()

    @property
    def num_free(self) -> int:
        """Pages that allocate can hand out, cached ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Pages that some block table holds."""
        return self.num_pages - self.num_free

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose content is kept."""
        return len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one owner. Raises OutOfPagesError and changes nothing."""
        if count > self.num_free:
            raise OutOfPagesError(f"{count} pages wanted, {self.num_free} free")
        pages = []
        for _ in range(count):
            if self._free:
                page = heapq.heappop(self._free)
            else:
                page, _ = self._evictable.popitem(last=False)
                self._forget(page)
            self._ref_counts[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Add an owner to a used or cached page."""
        if self._ref_counts[page] == 0:
            del self._evictable[page]
        self._ref_counts[page] += 1

    def release(self, page: int) -> None:
        """Remove an owner; the last one frees the page, or leaves it cached if it has content."""
        self._ref_counts[page] -= 1
        if self._ref_counts[page] > 0:
            return
        if page in self._content:
            self._evictable[page] = None
        else:
            heapq.heappush(self._free, page)

    def is_shared(self, page: int) -> bool:
        """Whether someone else would see a write to the page: another owner, or the cache."""
        return self._ref_counts[page] > 1 or page in self._content

    def publish(self, page: int, parent: Hashable, tokens: tuple[int, ...]) -> Hashable:
        """Offer a full, committed page for reuse; returns the content id to chain the next page to.

        If the same content is already known, that page stays the known one.
        """
        key = (parent, tokens)
        known = self._by_key.get(key)
        if known is None:
            known = CachedPage(next(self._ids), page, key)
            self._by_key[key] = known
            self._content[page] = known
        return known.content_id

    def find(self, parent: Hashable, tokens: tuple[int, ...]) -> CachedPage | None:
        """The page that holds `tokens` after the content `parent`, if there is one."""
        return self._by_key.get((parent, tokens))

    def drop_cached(self) -> None:
        """Forget all content: cached pages become free, used ones keep their owners."""
        for page in self._evictable:
            heapq.heappush(self._free, page)
        self._evictable.clear()
        self._content.clear()
        self._by_key.clear()

    def _forget(self, page: int) -> None:
        content = self._content.pop(page)
        del self._by_key[content.key]

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Raise IntegrityError unless the books match `owners` (page to number of tables)."""
        free, cached = set(self._free), set(self._evictable)
        if len(free) != len(self._free):
            raise IntegrityError("a page is free twice")
        for page in range(self.num_pages):
            count = owners.get(page, 0)
            if self._ref_counts[page] != count:
                raise IntegrityError(
                    f"page {page}: {self._ref_counts[page]} references, {count} block tables"
                )
            places = (page in free) + (page in cached) + (count > 0)
            if places != 1:
                raise IntegrityError(f"page {page}: in {places} of free, cached and used")
        if not cached <= self._content.keys():
            raise IntegrityError("a cached page has no content")
        for key, content in self._by_key.items():
            if self._content.get(content.page) is not content or content.key != key:
                raise IntegrityError(f"page {content.page}: content and key disagree")
        if len(self._by_key) != len(self._content):
            raise IntegrityError("a page has content that cannot be found")
