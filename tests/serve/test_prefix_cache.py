"""The tree of prompts that have been read: hits at snapshots only, pages held as long as they are of use."""

import numpy as np
import pytest

from k3jax.serve.pages import PagePool
from k3jax.serve.prefix_cache import PrefixCache

SLOTS = (7, 8, 9)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(range(1, 21))


@pytest.fixture
def cache(pool: PagePool) -> PrefixCache:
    return PrefixCache(pool, page=2, slots=SLOTS)


def insert(cache: PrefixCache, pool: PagePool, tokens: list[int]) -> int | None:
    """As a sequence does that has read `tokens` and ends."""
    pages = pool.take(len(tokens) // 2)
    slot = cache.insert(tokens, pages)
    pool.drop(pages)
    return slot


def test_a_hit_ends_at_a_snapshot_although_more_pages_are_known(cache, pool) -> None:
    assert insert(cache, pool, [1, 2, 3, 4]) == 7
    assert insert(cache, pool, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    found = cache.match([1, 2, 3, 4, 5, 6, 9, 9])
    assert (found.length, found.snapshot, found.shared) == (4, 7, 6)
    assert len(found.pages) == 2
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).length == 8


def test_nothing_is_reused_between_snapshots_or_inside_a_page(cache, pool) -> None:
    insert(cache, pool, [1, 2, 3, 4])
    for tokens in ([1, 2], [1, 2, 3], [1, 9, 3, 4], [3, 4], []):
        assert cache.match(tokens).length == 0
        assert cache.match(tokens).snapshot == -1


def test_equal_beginnings_share_their_pages(cache, pool) -> None:
    insert(cache, pool, [1, 2, 3, 4])
    insert(cache, pool, [1, 2, 3, 4, 5, 6])
    assert pool.num_free == 20 - 3
    a, b = cache.match([1, 2, 3, 4]).pages, cache.match([1, 2, 3, 4, 5, 6]).pages
    assert b[:2] == a


def test_a_second_snapshot_of_the_same_tokens_is_not_taken(cache, pool) -> None:
    assert insert(cache, pool, [1, 2]) == 7
    assert insert(cache, pool, [1, 2]) is None
    assert [insert(cache, pool, [3, 4]), insert(cache, pool, [5, 6])] == [8, 9]


def test_the_least_recently_used_snapshot_makes_room(cache, pool) -> None:
    for tokens in ([1, 2], [3, 4], [5, 6]):
        insert(cache, pool, tokens)
    cache.match([1, 2])
    assert insert(cache, pool, [7, 8]) == 8
    assert [cache.match(tokens).length for tokens in ([1, 2], [3, 4], [5, 6], [7, 8])] == [2, 0, 2, 2]


def test_a_snapshot_on_the_way_can_go_without_its_pages(cache, pool) -> None:
    insert(cache, pool, [1, 2])
    insert(cache, pool, [1, 2, 3, 4])
    insert(cache, pool, [5, 6])
    insert(cache, pool, [7, 8])  # takes the place of [1, 2]
    assert cache.match([1, 2, 9]).length == 0
    assert cache.match([1, 2, 3, 4]).length == 4
    assert pool.num_free == 20 - 4


def test_pages_of_a_running_sequence_outlive_their_eviction(cache, pool) -> None:
    insert(cache, pool, [1, 2, 3, 4])
    found = cache.match([1, 2, 3, 4])
    pool.hold(found.pages)
    assert cache.num_evictable == 0
    assert cache.evict()
    assert not cache.evict()
    assert pool.num_free == 18
    pool.drop(found.pages)
    assert pool.num_free == 20


def test_without_slots_nothing_is_kept(pool) -> None:
    cache = PrefixCache(pool, page=2, slots=())
    assert insert(cache, pool, [1, 2]) is None
    assert pool.num_free == 20


def test_random_use_loses_no_page_and_no_slot(cache, pool) -> None:
    """Against a plain list of what was kept: every hit is a kept prefix, and every page comes back."""
    rng, kept, running = np.random.default_rng(0), [], []
    for _ in range(3000):
        tokens = rng.integers(0, 2, rng.integers(1, 5) * 2).tolist()
        found = cache.match(tokens)
        assert found.length == 0 or tokens[: found.length] in kept
        pool.hold(found.pages)
        rest = len(tokens) // 2 - len(found.pages)
        while pool.num_free < rest and cache.evict():
            pass
        if pool.num_free < rest:
            pool.drop(found.pages)
        else:
            pages = [*found.pages, *pool.take(rest)]
            if cache.insert(tokens, pages) is not None:
                kept.append(tokens)
            running.append(pages)
        if len(running) > 3:
            pool.drop(running.pop(int(rng.integers(len(running)))))
        assert cache.num_snapshots <= len(SLOTS)
    for pages in running:
        pool.drop(pages)
    while cache.evict():
        pass
    assert pool.num_free == 20
    assert sorted(insert(cache, pool, [i, i]) for i in range(3)) == list(SLOTS)
