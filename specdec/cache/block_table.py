"""The block table of one request: logical slots to pages, with transactional tree slots."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specdec.cache.pages import OutOfPagesError, PagePool


class BlockTable:
    """Pages of one request, in logical order. Slots below num_committed hold KV of its tokens.

    reserve makes room for the rows of a step past num_committed, commit keeps the first of them
    and gives whole pages past them back, release gives everything back. Any reserved slot is
    exclusively owned: a page that others can see is replaced by a copy first.
    """

    def __init__(self, pool: PagePool, page_size: int, namespace: Hashable) -> None:
        self._pool = pool
        self._page_size = page_size
        self.pages: list[int] = []
        self.num_committed = 0
        # What comes before each page: the namespace, then the content of the pages published.
        self._contents: list[Hashable] = [namespace]

    @property
    def num_slots(self) -> int:
        """Slots that the pages offer."""
        return len(self.pages) * self._page_size

    def pages_needed(self, num_slots: int) -> int:
        """Pages that reserve(num_slots) would take from the pool."""
        total = -(-(self.num_committed + num_slots) // self._page_size)
        return max(0, total - len(self.pages)) + int(self._tail_is_shared())

    def _tail_is_shared(self) -> bool:
        index = self.num_committed // self._page_size
        return index < len(self.pages) and self._pool.is_shared(self.pages[index])

    def match_prefix(self, tokens: Sequence[int]) -> int:
        """Take over cached pages that hold the beginning of `tokens`; returns the committed length.

        At least one token is left to compute. Only for an empty table.
        """
        assert not self.pages
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            content = tuple(tokens[start : start + self._page_size])
            known = self._pool.find(self._contents[-1], content)
            if known is None:
                break
            self._pool.share(known.page)
            self.pages.append(known.page)
            self._contents.append(known.content_id)
        self.num_committed = min(len(self.pages) * self._page_size, len(tokens) - 1)
        return self.num_committed

    def fork(self, other: BlockTable, num_tokens: int) -> None:
        """Share the pages that hold the first num_tokens committed tokens of another request.

        Only for an empty table. The page in which the two go on is copied by whoever writes first.
        """
        assert not self.pages
        assert num_tokens <= other.num_committed
        self.pages = other.pages[: -(-num_tokens // self._page_size)]
        for page in self.pages:
            self._pool.share(page)
        self.num_committed = num_tokens
        self._contents = other._contents[: num_tokens // self._page_size + 1]

    def reserve(self, num_slots: int) -> list[tuple[int, int]]:
        """Own the slots num_committed .. num_committed + num_slots - 1 exclusively.

        Returns (source page, new page) copies that must be made before anything is written.
        Raises OutOfPagesError and changes nothing.
        """
        needed = self.pages_needed(num_slots)
        if needed > self._pool.num_free:
            raise OutOfPagesError(f"{needed} pages wanted, {self._pool.num_free} free")
        copies = []
        if self._tail_is_shared():
            index = self.num_committed // self._page_size
            shared = self.pages[index]
            (own,) = self._pool.allocate(1)
            self._pool.release(shared)
            self.pages[index] = own
            copies.append((shared, own))
            needed -= 1
        self.pages.extend(self._pool.allocate(needed))
        return copies

    def commit(self, num_tokens: int) -> None:
        """Keep the first num_tokens reserved slots; pages wholly past them go back to the pool."""
        self.num_committed += num_tokens
        assert self.num_committed <= self.num_slots
        keep = -(-self.num_committed // self._page_size)
        for page in reversed(self.pages[keep:]):
            self._pool.release(page)
        del self.pages[keep:]

    def publish(self, tokens: Sequence[int]) -> None:
        """Offer newly completed pages for reuse; `tokens` are the request's, from the first."""
        while len(self._contents) * self._page_size <= self.num_committed:
            index = len(self._contents) - 1
            start = index * self._page_size
            content = tuple(tokens[start : start + self._page_size])
            page = self.pages[index]
            self._contents.append(self._pool.publish(page, self._contents[-1], content))

    def release(self) -> None:
        """Give every page back; the deepest first, so that prefixes outlive their continuations."""
        for page in reversed(self.pages):
            self._pool.release(page)
        self.pages.clear()
        self.num_committed = 0

    def slots(self, first: int, count: int) -> list[int]:
        """Physical slots of the logical slots first .. first + count - 1."""
        size = self._page_size
        return [
            self.pages[slot // size] * size + slot % size for slot in range(first, first + count)
        ]
