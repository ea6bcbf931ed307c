"""write_kv, moves and layouts in Triton's interpreter; `test_triton.py` runs this file."""

from __future__ import annotations

import random

import pytest
import torch

from specdec_kernels import TreeBatch, compact_kv, copy_pages, layout_trees, write_kv
from specdec_kernels.compact_kv.triton import _COUNTS, _pairs, triton_compact_paths
from tests.kernels import kv_cases as cases
from tests.kernels import layout_cases
from tests.kernels.kv_cases import bits, noise

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (1, 72), (5, 80), (40, 32)])
def test_write_kv(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    wide = noise(6, 2, heads, head_dim, dtype=dtype)
    slots = torch.tensor([19, 0, 7, 4, 12, 1])
    results = []
    for impl in ("reference", "triton"):
        caches = noise(2, 5, 4, heads, head_dim, dtype=dtype)
        write_kv(wide[:, 0], wide[:, 1], caches[0], caches[1], slots, impl=impl)
        results.append(bits(caches))
    assert torch.equal(*results)


@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_write_kv_widens(source: torch.dtype) -> None:
    """Keys may lie in any order; the last dimension need not be contiguous."""
    key = torch.randn(8, 3, 4).to(source).permute(2, 1, 0)
    kept = torch.float64 if source == torch.float32 else torch.float32
    caches = torch.zeros(2, 2, 4, 3, 8, dtype=kept)
    slots = torch.tensor([6, 1, 2, 7])
    write_kv(key, -key, caches[0], caches[1], slots, impl="triton")
    assert torch.equal(caches[0].flatten(0, 1)[slots], key.to(kept))
    assert torch.equal(caches[1].flatten(0, 1)[slots], -key.to(kept))
    assert caches[0].flatten(0, 1)[[0, 3, 4, 5]].count_nonzero() == 0
    write_kv(key[:0], key[:0], caches[0], caches[1], slots[:0], impl="triton")
    with pytest.raises(ValueError, match=r"slots: must lie in 0..7, .* got 2..8"):
        write_kv(key, key, caches[0], caches[1], slots + 1, impl="triton")


@pytest.mark.parametrize("dtype", cases.QUANTISED, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
def test_write_kv_quantises(source: torch.dtype, dtype: torch.dtype) -> None:
    cases.check_quantised_write(source, dtype, 3, "triton")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", cases.QUANTISED, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 8, 17, 70])
@pytest.mark.parametrize("source", [*FLOATS, torch.float64], ids=str)
def test_write_kv_quantises_any_heads(source: torch.dtype, heads: int, dtype: torch.dtype) -> None:
    cases.check_quantised_write(source, dtype, heads, "triton")


@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim"),
    [
        (torch.int8, 4, 7),
        (torch.float8_e4m3fn, 1, 80),
        (torch.bfloat16, 64, 1),
        (torch.float16, 1, 7),
        (torch.float32, 4, 80),
        (torch.int64, 64, 7),
    ],
    ids=str,
)
def test_compact_kv(page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    cases.check_moves(dtype, head_dim, page_size, "triton")


@pytest.mark.parametrize("count", [16, 17, 65, 257, 1025])
def test_compact_kv_of_any_number_of_moves(count: int) -> None:
    """One cycle through all slots: each is read and overwritten."""
    cache = noise(1, 300, 4, 1, 3, dtype=torch.bfloat16)
    slots = list(range(1200))
    random.Random(count).shuffle(slots)
    dst = slots[:count]
    src = dst[1:] + dst[:1]
    wanted = cases.moved(cache, src, dst)
    compact_kv([cache], torch.tensor(src), torch.tensor(dst), impl="triton")
    assert torch.equal(bits(cache).view_as(wanted), wanted)
    assert (count > _COUNTS[-1]) == (count == 1025)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_copy_pages(dtype: torch.dtype) -> None:
    caches = [noise(3, 6, 4, 2, 5, dtype=dtype), noise(3, 6, 4, 2, dtype=torch.float32)]
    expected = [bits(cache).clone() for cache in caches]
    for wanted in expected:
        wanted[:, [1, 4, 2]] = wanted[:, [4, 0, 2]]
    copy_pages(caches, torch.tensor([4, 0, 2]), torch.tensor([1, 4, 2]), impl="triton")
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits(cache), wanted)


def test_keys_and_values_of_one_shape_share_a_launch() -> None:
    shapes = [(2, 3, 4, 1, 8), (2, 3, 4, 2, 8), (2, 3, 4, 1, 8), (2, 3, 4, 1, 8), (2, 3, 4, 1)]
    stacks = [torch.zeros(shape) for shape in shapes]
    pairs = [len(pair) for pair in _pairs(stacks, [stack.dim() - 3 for stack in stacks])]
    assert sorted(pairs) == [1, 1, 1, 2]


def test_a_stack_that_begins_at_an_odd_byte() -> None:
    whole = noise(1 + 2 * 3 * 4 * 8, dtype=torch.int8)
    stack = whole[1:].view(2, 3, 4, 1, 8)
    wanted = cases.moved(stack, [5, 6], [4, 5])
    first = int(whole[0])
    compact_kv([stack], torch.tensor([5, 6]), torch.tensor([4, 5]), impl="triton")
    assert torch.equal(bits(stack).view_as(wanted), wanted)
    assert whole[0] == first


@pytest.mark.parametrize(("seed", "page_size"), [(0, 1), (1, 4), (2, 64)])
def test_compact_paths(seed: int, page_size: int) -> None:
    sizes = random.Random(seed).choices([1, 2, 9, 40, 256, -1, -30], k=4)
    cases.check_paths(cases.random_paths(random.Random(seed), sizes, page_size), "triton")


def test_entries_that_are_no_part_of_a_path_are_left_out() -> None:
    """A device cannot raise: nodes that stand too low or outside the request move nothing."""
    batch = TreeBatch.from_lists([[-1, 0, 0, 0], 2, 1], [3, 0, 2], [[5, 2], [0], [4]], 4)
    paths = torch.tensor(
        [[0, 2, 1, -9, 3, 4], [0, 1, 2, 9, 2**31 - 1, 5], [0, 1, 2, 3, 4, 5]], dtype=torch.int32
    )
    cache = noise(1, 6, 4, 1, 8, dtype=torch.float32)
    wanted = cases.moved(cache, [2 * 4 + 1], [2 * 4])
    num_nodes = torch.tensor([2**31 - 1, 7, -3], dtype=torch.int32)
    triton_compact_paths([cache], batch, paths, num_nodes)
    assert torch.equal(bits(cache).view_as(wanted), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", cases.STORED, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 128])
@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_path(seed: int, page_size: int, dtype: torch.dtype) -> None:
    sizes = random.Random(seed).choices([1, 2, 9, 40, 256, -1, -30], k=5)
    cases.check_paths(cases.random_paths(random.Random(seed), sizes, page_size), "triton", dtype)


@pytest.mark.parametrize(
    "page_size",
    [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)],
)
def test_compact_paths_of_overlapping_paths(page_size: int) -> None:
    cases.check_paths(cases.long_paths(page_size), "triton")


def test_layouts_of_nothing() -> None:
    layout_cases.check_nothing("triton")


@pytest.mark.parametrize(("sizes", "page_size", "num_words"), layout_cases.BATCHES)
def test_layouts(sizes: list[int], page_size: int, num_words: int) -> None:
    layout_cases.check(sizes, page_size, num_words, "triton")


@pytest.mark.parametrize(("bad", "num_words"), layout_cases.MALFORMED)
def test_malformed_trees_are_reported(bad: list[int], num_words: int) -> None:
    layout_cases.check_malformed(bad, num_words, "triton")


def test_slots_without_a_page_and_rows_that_are_not_there() -> None:
    """Two pages of four, and prefix sums that go beyond the rows: nothing is read out of bounds."""
    layout = layout_trees(
        torch.tensor([-1, 0, 1, -1], dtype=torch.int32),
        torch.tensor([0, 3, 9], dtype=torch.int32),
        torch.tensor([6, -2], dtype=torch.int32),
        torch.tensor([[8, 3], [5, 7]], dtype=torch.int32),
        page_size=4, num_words=1, num_lanes=2, impl="triton",
    )  # fmt: skip
    assert layout.depths.tolist() == [0, 1, 2, 0]
    assert layout.slots.tolist() == [3 * 4 + 2, 3 * 4 + 3, -1, -1]
    assert layout.lane_slots.tolist() == [[14, 13], [15, 14], [-1, 15], [-1, -1]]
    assert layout.private_nodes.tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_layouts(seed: int) -> None:
    layout_cases.check(*layout_cases.random_batch(seed), impl="triton", seed=seed)
