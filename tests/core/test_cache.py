"""Pages are never lost, shared content is never overwritten, failed reservations change nothing."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.cache import CacheManager, IntegrityError, KVStore, LayerShape, OutOfPagesError


def manager(num_pages: int = 8, page_size: int = 4, *, prefix_cache: bool = True) -> CacheManager:
    return CacheManager(num_pages, page_size, prefix_cache=prefix_cache)


def test_reserve_commit_release_round_trip() -> None:
    cache = manager()
    table = cache.open("a")
    assert table.reserve(10) == []
    assert len(table.pages) == 3
    table.commit(5)
    assert (len(table.pages), table.num_committed, cache.pool.num_used) == (2, 5, 2)
    cache.check_integrity()
    cache.close("a")
    assert cache.pool.num_free == 8
    cache.check_integrity()


def test_a_failed_reservation_changes_nothing() -> None:
    cache = manager(num_pages=2)
    table = cache.open("a")
    table.reserve(4)
    table.commit(4)
    before = (list(table.pages), cache.pool.num_free)
    with pytest.raises(OutOfPagesError):
        table.reserve(5)
    assert (list(table.pages), cache.pool.num_free) == before
    cache.check_integrity()


def fill(cache: CacheManager, request_id: str, tokens: list[int]) -> None:
    table = cache.open(request_id)
    table.match_prefix(tokens)
    table.reserve(len(tokens) - table.num_committed)
    table.commit(len(tokens) - table.num_committed)
    table.publish(tokens)


def test_a_prefix_is_shared_up_to_the_last_token_but_one() -> None:
    cache = manager()
    fill(cache, "a", list(range(8)))
    pages = cache.page_owners()["a"]
    cache.close("a")
    assert cache.pool.num_cached == 2

    longer = cache.open("longer")
    assert longer.match_prefix([*range(8), 99]) == 8
    assert longer.pages == pages
    same = cache.open("same")
    assert same.match_prefix(list(range(8))) == 7  # one token is left to compute
    other = cache.open("other")
    assert other.match_prefix([0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    cache.check_integrity()


def test_equal_pages_after_different_prefixes_are_different_content() -> None:
    cache = manager()
    fill(cache, "a", [1, 2, 3, 4, 7, 7, 7, 7])
    fill(cache, "b", [5, 6, 7, 8, 7, 7, 7, 7])
    a, b = cache.page_owners()["a"], cache.page_owners()["b"]
    assert a[1] != b[1]
    probe = cache.open("probe")
    probe.match_prefix([5, 6, 7, 8, 7, 7, 7, 7, 0])
    assert probe.pages == b


def test_writing_into_shared_content_copies_the_page_first() -> None:
    cache = manager()
    tokens = list(range(8))
    fill(cache, "a", tokens)
    table = cache.open("b")
    table.match_prefix(tokens)
    shared = table.pages[1]
    ((source, target),) = table.reserve(3)
    assert source == shared
    assert table.pages[1] == target != shared
    assert cache.page_owners()["a"][1] == shared
    cache.check_integrity()


def test_the_least_recently_released_content_is_evicted_leaf_first() -> None:
    cache = manager(num_pages=4)
    fill(cache, "old", list(range(8)))
    cache.close("old")
    fill(cache, "new", list(range(100, 108)))
    cache.close("new")
    table = cache.open("x")
    table.reserve(4)  # one page: the deeper page of "old" goes
    assert cache.open("y").match_prefix([*range(8), 0]) == 4
    assert cache.open("z").match_prefix([*range(100, 108), 0]) == 8
    cache.check_integrity()


def test_random_life_of_many_requests_keeps_the_books() -> None:
    rng = random.Random(0)
    cache = manager(num_pages=40, page_size=4)
    tokens: dict[str, list[int]] = {}
    for turn in range(3000):
        action = rng.random()
        if action < 0.35 and len(tokens) < 8:
            name = f"r{turn}"
            # Few distinct tokens: prefixes are shared often.
            tokens[name] = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
            cache.open(name).match_prefix(tokens[name])
        elif tokens and action < 0.85:
            name = rng.choice(sorted(tokens))
            table = cache._tables[name]
            rows = rng.randrange(1, 12)
            try:
                table.reserve(rows)
            except OutOfPagesError:
                cache.close(name)
                del tokens[name]
            else:
                for page in table.pages[table.num_committed // 4 :]:
                    assert not cache.pool.is_shared(page)
                table.commit(rng.randrange(rows + 1))
                while len(tokens[name]) < table.num_committed + 1:
                    tokens[name].append(rng.randrange(2))
                table.publish(tokens[name])
        elif tokens:
            name = rng.choice(sorted(tokens))
            cache.close(name)
            del tokens[name]
        cache.check_integrity()
    for name in tokens:
        cache.close(name)
    assert cache.pool.num_used == 0
    cache.reset()
    assert cache.pool.num_cached == 0
    cache.check_integrity()


@pytest.mark.parametrize("damage", ["lost", "double", "uncounted"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    cache = manager()
    table = cache.open("a")
    table.reserve(8)
    if damage == "lost":
        table.pages.pop()
    elif damage == "double":
        table.pages[1] = table.pages[0]
    else:
        cache.pool._free.append(table.pages[0])
    with pytest.raises(IntegrityError):
        cache.check_integrity()


def test_reset_needs_an_idle_cache() -> None:
    cache = manager()
    cache.open("a")
    with pytest.raises(IntegrityError):
        cache.reset()


def test_moves_reach_every_layer_whatever_its_shape() -> None:
    layers = [LayerShape(2, 4), LayerShape(1, 8), LayerShape(2, 4)]
    store = KVStore(layers, 4, 4, torch.float32, torch.device("cpu"))
    for index in range(3):
        for tensor in store.layer(index):
            assert not tensor.any()
            tensor.copy_(torch.rand_like(tensor))
    before = [[tensor.clone().flatten(0, 1) for tensor in store.layer(i)] for i in range(3)]
    store.compact([(5, 4), (7, 5), (4, 9)])  # overlapping: 4 and 5 are both read and written
    store.copy_pages([(0, 3)])
    for old, index in zip(before, range(3), strict=True):
        for was, now in zip(old, store.layer(index), strict=True):
            flat = now.flatten(0, 1)
            assert torch.equal(flat[4], was[5])
            assert torch.equal(flat[5], was[7])
            assert torch.equal(flat[9], was[4])
            assert torch.equal(flat[12:16], was[0:4])
            assert torch.equal(flat[:4], was[:4])
