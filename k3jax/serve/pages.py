"""Which pages are free, and how many hold on to each of the others. Numbers only: the pages are on the device."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Some pages. Each is free until it is taken, and again when everyone who held it has dropped it."""

    def __init__(self, pages: Iterable[int]) -> None:
        self._free = list(pages)[::-1]
        self._holders = dict.fromkeys(self._free, 0)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Free pages for one holder. The caller has looked at `num_free`; IndexError where there are fewer."""
        pages = [self._free.pop() for _ in range(count)]
        self.hold(pages)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder of each."""
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder of each less."""
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was dropped more often than held"
            if self._holders[page] == 0:
                self._free.append(page)
