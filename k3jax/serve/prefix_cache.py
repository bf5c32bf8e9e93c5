"""Prompts that have been read: a radix tree of token pages, and the KDA states at some of its nodes.

A sequence can be continued from a prefix only where both halves of its memory are there: the MLA pages of every token,
and a snapshot of the KDA state after exactly the last of them. So a hit ends at a node with a snapshot, never between.
A path exists only for the sake of a snapshot at its end or on the way: without one its pages are worth nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from k3jax.serve.pages import PagePool


@dataclass(eq=False)
class _Node:
    """One page of tokens after its parent's; `snapshot` is the slot of the state after its last token."""

    parent: _Node | None
    key: tuple[int, ...]
    page: int
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    snapshot: int | None = None


@dataclass(frozen=True, kw_only=True)
class Match:
    """The longest prefix that can be continued: its tokens, its pages and the slot of its state (-1: none at all).

    `shared` tokens are in the tree, so that many are known to be common to two prompts; it is at least `length`.
    """

    length: int
    pages: tuple[int, ...]
    snapshot: int
    shared: int


class PrefixCache:
    """The tree, over pages of `page` tokens from `pool` and the given slots for snapshots; least recently used go."""

    def __init__(self, pool: PagePool, *, page: int, slots: Sequence[int]) -> None:
        self._pool, self._page = pool, page
        self._root = _Node(None, (), -1)
        self._free_slots = list(slots)[::-1]
        self._used: OrderedDict[_Node, None] = OrderedDict()  # nodes with a snapshot, the least recently used first

    @property
    def num_snapshots(self) -> int:
        """States kept."""
        return len(self._used)

    @property
    def num_evictable(self) -> int:
        """Pages that would become free if everything were evicted."""
        return sum(self._pool.holders(node.page) == 1 for node in self._nodes())

    def match(self, tokens: Sequence[int]) -> Match:
        """What the tree has of the beginning of `tokens`."""
        node, path = self._root, list[int]()
        best, length = None, 0
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            path.append(node.page)
            if node.snapshot is not None:
                best, length = node, len(path)
        if best is not None:
            self._used.move_to_end(best)
        snapshot = -1 if best is None or best.snapshot is None else best.snapshot
        size = self._page
        return Match(length=length * size, pages=tuple(path[:length]), snapshot=snapshot, shared=len(path) * size)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> int | None:
        """Keep whole pages of tokens; returns the slot that the state after them must be copied to, None if none.

        Pages of tokens that the tree has already stay as they are: equal tokens have equal latents.
        """
        slot = self._free_slots.pop() if self._free_slots else self._take_oldest_slot()
        if slot is None:
            return None
        node = self._root
        for key, page in zip(self._keys(tokens), pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key, page)
                self._pool.hold([page])
            node = child
        if node.snapshot is not None or node is self._root:
            self._free_slots.append(slot)
            return None
        node.snapshot = slot
        self._used[node] = None
        return slot

    def evict(self) -> bool:
        """Give up the least recently used end of a path, and its pages; False where there is nothing left."""
        leaf = next((node for node in self._used if not node.children), None)
        if leaf is None:
            return False
        self._forget(leaf)
        return True

    def _take_oldest_slot(self) -> int | None:
        if not self._used:
            return None
        self._forget(next(iter(self._used)))
        return self._free_slots.pop()

    def _forget(self, node: _Node) -> None:
        """Drop a snapshot, and the nodes that nothing needs without it."""
        assert node.snapshot is not None
        self._free_slots.append(node.snapshot)
        node.snapshot = None
        del self._used[node]
        while node.parent is not None and not node.children and node.snapshot is None:
            del node.parent.children[node.key]
            self._pool.drop([node.page])
            node = node.parent

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self._page + 1, self._page):
            yield tuple(tokens[start : start + self._page])

    def _nodes(self) -> Iterator[_Node]:
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node
