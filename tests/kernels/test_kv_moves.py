"""write_kv, compact_kv, copy_pages, compact_paths: right contents, not a bit changed elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec_kernels import compact_kv, compact_paths, copy_pages, dequantise, quantise, write_kv
from specdec_kernels.dispatch import _FORMS
from tests.kernels import kv_cases as cases
from tests.kernels.kv_cases import bits, noise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def write_forms() -> list[str]:
    """The forms of write_kv that run on the CPU without an interpreter."""
    return [form for form in _FORMS["write_kv"] if form != "triton"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", write_forms())
def test_write_kv_writes_its_slots_only(impl: Any, dtype: torch.dtype) -> None:
    key, value = noise(2, 5, 3, 8, dtype=dtype)
    key_cache, value_cache = noise(2, 6, 4, 3, 8, dtype=dtype)
    slots = torch.tensor([3, 23, 0, 17, 8])
    expected = [key_cache.clone(), value_cache.clone()]
    for row, slot in enumerate(slots.tolist()):
        expected[0][slot // 4, slot % 4] = key[row]
        expected[1][slot // 4, slot % 4] = value[row]
    write_kv(key, value, key_cache, value_cache, slots, impl=impl)
    assert torch.equal(bits(key_cache), bits(expected[0]))
    assert torch.equal(bits(value_cache), bits(expected[1]))


@pytest.mark.parametrize("impl", write_forms())
def test_write_kv_takes_strided_rows_and_no_rows(impl: Any) -> None:
    wide = torch.randn(4, 2, 3, 8)
    caches = torch.zeros(2, 2, 4, 3, 8)
    write_kv(wide[:, 0], wide[:, 1], caches[0], caches[1], torch.arange(4), impl=impl)
    assert torch.equal(caches[0, 0], wide[:, 0])
    assert torch.equal(caches[1, 0], wide[:, 1])
    turned = torch.randn(8, 3, 4).permute(2, 1, 0)
    slots = torch.arange(16)[1:8:2]
    write_kv(turned, turned, caches[0], caches[1], slots, impl=impl)
    assert torch.equal(caches[1].flatten(0, 1)[slots], turned)
    before = caches.clone()
    write_kv(wide[:0, 0], wide[:0, 1], caches[0], caches[1], torch.arange(0), impl=impl)
    assert torch.equal(caches, before)


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float16, torch.float64),
        (torch.float32, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", write_forms())
def test_write_kv_widens_into_a_wider_cache(
    impl: Any, source: torch.dtype, kept: torch.dtype
) -> None:
    key = torch.randn(3, 2, 8).to(source)
    caches = torch.zeros(2, 2, 4, 2, 8, dtype=kept)
    write_kv(key, -key, caches[0], caches[1], torch.tensor([6, 1, 2]), impl=impl)
    assert torch.equal(caches[0].flatten(0, 1)[[6, 1, 2]], key.to(kept))
    assert torch.equal(caches[1].flatten(0, 1)[[6, 1, 2]], -key.to(kept))
    assert caches.count_nonzero() == caches[0].count_nonzero() * 2 == key.numel() * 2


@pytest.mark.parametrize("dtype", cases.QUANTISED, ids=str)
@pytest.mark.parametrize("impl", write_forms())
def test_write_kv_stores_what_quantise_says(impl: Any, dtype: torch.dtype) -> None:
    key, value = torch.randn(2, 5, 3, 8)
    caches = noise(2, 6, 4, 3, 8, dtype=dtype)
    scales = torch.randn(2, 6, 4, 3)
    expected, expected_scales = caches.clone(), scales.clone()
    slots = torch.tensor([3, 23, 0, 17, 8])
    for half, rows in enumerate((key, value)):
        numbers, row_scales = quantise(rows, dtype)
        for row, slot in enumerate(slots.tolist()):
            expected[half, slot // 4, slot % 4] = numbers[row]
            expected_scales[half, slot // 4, slot % 4] = row_scales[row]
    write_kv(
        key, value, caches[0], caches[1], slots,
        key_scales=scales[0], value_scales=scales[1], impl=impl,
    )  # fmt: skip
    assert torch.equal(bits(caches), bits(expected))
    assert torch.equal(bits(scales), bits(expected_scales))
    read = dequantise(caches[0].flatten(0, 1)[slots], scales[0].flatten(0, 1)[slots], key.dtype)
    torch.testing.assert_close(read, key, atol=0.13, rtol=0)


@pytest.mark.parametrize("dtype", cases.QUANTISED, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("impl", [form for form in write_forms() if form != "reference"])
def test_every_form_quantises_to_the_same_bits(
    impl: Any, source: torch.dtype, dtype: torch.dtype
) -> None:
    cases.check_quantised_write(source, dtype, 3, impl)


BF16 = torch.bfloat16
CACHE, INT_CACHE = torch.zeros(6, 4, 3, 8), torch.zeros(6, 4, 3, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": torch.zeros(5, 2, 8)}, "key and value: must be"),
        ({"value": torch.zeros(5, 3, 4)}, "key and value: must be"),
        ({"key_cache": torch.zeros(24, 3, 8)}, "key_cache and value_cache: must have one shape"),
        ({"value_cache": CACHE[..., :4]}, "key_cache and value_cache: must have one shape"),
        ({"key_cache": torch.zeros(6, 3, 4, 8).transpose(1, 2)}, "must be contiguous"),
        ({"slots": torch.zeros(5, dtype=torch.int32)}, "slots: must be int64"),
        ({"slots": torch.arange(4)}, "slots: must be int64"),
        ({"slots": torch.arange(5) + 20}, r"slots: must lie in 0..23, .* got 20..24"),
        ({"slots": torch.arange(5) - 1}, r"slots: must lie in 0..23, .* got -1..3"),
        ({"slots": torch.arange(5, device="meta")}, "must be on one device"),
        ({"value": torch.zeros(5, 3, 8, dtype=BF16)}, "key and value: must have one dtype"),
        ({"key": INT_CACHE[0, 0].expand(5, 3, 8)}, "key and value: must have one dtype"),
        ({"value_cache": CACHE.double()}, "key_cache and value_cache: must both be"),
        ({"key_cache": CACHE.to(BF16), "value_cache": CACHE.to(BF16)}, "must both be"),
        ({"key_cache": INT_CACHE, "value_cache": INT_CACHE}, "key_scales: a .* cache needs"),
        ({"key_scales": torch.zeros(6, 4, 3)}, "key_scales: must be None"),
        ({"value_scales": torch.zeros(6, 4, 3)}, "value_scales: must be None"),
        ({"impl": "fast"}, "impl: must be one of"),
    ],
)
def test_write_kv_refuses(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "key": torch.zeros(5, 3, 8),
        "value": torch.zeros(5, 3, 8),
        "key_cache": torch.zeros(6, 4, 3, 8),
        "value_cache": torch.zeros(6, 4, 3, 8),
        "slots": torch.arange(5),
    }
    write_kv(**arguments)
    with pytest.raises(ValueError, match=message):
        write_kv(**(arguments | changed))


def test_write_kv_refuses_scales_that_do_not_fit() -> None:
    row, scales = torch.zeros(5, 3, 8), torch.zeros(6, 4, 3)
    good = {"key_scales": scales, "value_scales": scales.clone()}
    arguments = (row, row, INT_CACHE.clone(), INT_CACHE.clone(), torch.arange(5))
    write_kv(*arguments, **good)
    with pytest.raises(ValueError, match=r"value_scales: a torch.int8 cache needs float32"):
        write_kv(*arguments, **(good | {"value_scales": scales.double()}))
    with pytest.raises(ValueError, match=r"key_scales: .* \(6, 4, 3\), got torch.float32 \(6, 4,"):
        write_kv(*arguments, **(good | {"key_scales": scales[..., :2]}))
    with pytest.raises(ValueError, match="value_scales: must be contiguous"):
        write_kv(*arguments, **(good | {"value_scales": torch.zeros(6, 3, 4).transpose(1, 2)}))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([5, 6, 7], [4, 5, 6]),
        ([4, 5, 6], [5, 6, 7]),
        ([9, 3], [3, 9]),
        ([2, 2, 2], [20, 21, 22]),
        ([11], [11]),
        ([], []),
    ],
    ids=["down", "up", "swap", "fan-out", "stay", "none"],
)
def test_compact_kv_reads_everything_before_it_writes(src: list[int], dst: list[int]) -> None:
    caches = [noise(4, 6, 4, 3, 8, dtype=BF16), noise(2, 6, 4, 1, 16, dtype=torch.float32)]
    expected = [cases.moved(cache, src, dst) for cache in caches]
    compact_kv(caches, torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits(cache).view_as(wanted), wanted)


@pytest.mark.parametrize("dtype", cases.STORED, ids=str)
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("head_dim", [1, 7, 80])
def test_compact_kv_equals_numpy(head_dim: int, page_size: int, dtype: torch.dtype) -> None:
    cases.check_moves(dtype, head_dim, page_size, "auto")


def test_copy_pages_copies_whole_pages_in_every_group() -> None:
    caches = [noise(3, 6, 4, 2, 8, dtype=dtype) for dtype in (BF16, torch.float8_e4m3fn)]
    caches.append(noise(3, 6, 4, 2, dtype=torch.float32))
    expected = [bits(cache).clone() for cache in caches]
    for wanted in expected:
        wanted[:, [1, 4]] = wanted[:, [4, 0]]
    copy_pages(caches, torch.tensor([4, 0]), torch.tensor([1, 4]))
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits(cache), wanted)


@pytest.mark.parametrize("move", [compact_kv, copy_pages])
def test_moves_refuse(move: Callable[..., None]) -> None:
    caches = [torch.zeros(2, 3, 4, 1, 8), torch.zeros(2, 3, 4, 1)]
    one = torch.tensor([1])
    move(caches, one, one)
    for bad, message in (
        (caches[0][0, 0], r"caches\[1\]: must be \[num_groups"),
        (torch.zeros(2, 3, 8, 1, 8)[:, :, :4], r"caches\[1\]: must be contiguous"),
        (torch.zeros(2, 3, 4, 1, device="meta"), r"caches\[1\]: must be contiguous and on"),
    ):
        with pytest.raises(ValueError, match=message):
            move([caches[0], bad], one, one)
    for src, dst, message in (
        (one, torch.tensor([1, 2]), "must be int64 of one length"),
        (one.int(), one.int(), "must be int64 of one length"),
        (one + 11, one, r"src_\w+: must lie in 0..\d+, got 12..12"),
        (one, one - 2, r"dst_\w+: must lie in 0..\d+, got -1..-1"),
        (torch.tensor([0, 1]), torch.tensor([2, 2]), r"dst_\w+: must be distinct, got \[2, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            move(caches, src, dst)
    with pytest.raises(ValueError, match='impl: compact_kv has no form "cpu"'):
        move(caches, one, one, impl="cpu")


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("seed", range(6))
def test_compact_paths_equals_numpy(seed: int, page_size: int) -> None:
    sizes = random.Random(seed).choices([1, 2, 9, 40, 256, -1, -30], k=6)
    cases.check_paths(cases.random_paths(random.Random(seed), sizes, page_size), "auto")


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_compact_paths_of_overlapping_paths(page_size: int) -> None:
    cases.check_paths(cases.long_paths(page_size), "auto")


def test_compact_paths_moves_nothing_that_is_in_place() -> None:
    """An accepted principal path: no element of a cache is even read or written."""
    batch, paths, kept, _ = cases.random_paths(random.Random(0), [-7, -3], 4)
    caches = [torch.zeros(1, 9, 4, 1, 1)]
    version = caches[0]._version
    compact_paths(caches, batch, paths, kept)
    assert caches[0]._version == version
    none = torch.zeros(0, 3, dtype=torch.int32)
    empty = cases.random_paths(random.Random(0), [], 4).batch
    compact_paths(caches, empty, none, none[:, 0])


def test_compact_paths_refuses() -> None:
    batch = cases.random_paths(random.Random(0), [5, -3], 4).batch
    caches: list[Tensor] = [torch.zeros(2, 12, 4, 1, 8)]
    paths = torch.tensor([[0, 2, 4, -1], [0, 1, -1, -1]], dtype=torch.int32)
    kept = torch.tensor([3, 2], dtype=torch.int32)
    compact_paths(caches, batch, paths, kept)
    for changed_paths, changed_kept, message in (
        (paths.long(), kept, r"paths: must be int32 \[R = 2, N\], got torch.int64"),
        (paths[:1], kept, r"paths: must be int32 \[R = 2, N\]"),
        (paths, kept.long(), r"num_nodes: must be int32 \[R = 2\], got torch.int64"),
        (paths, kept[:1], r"num_nodes: must be int32 \[R = 2\]"),
        (paths, kept.to("meta"), "paths, num_nodes and batch: must be on one device"),
        (paths, kept + 3, "num_nodes: request 0 has 6, must lie in 0..4"),
        (paths, -kept, "num_nodes: request 0 has -3"),
        (paths, kept + 1, r"paths: request 0 has nodes \[0, 2, 4, -1\], must ascend"),
        (paths.flip(0), kept, r"paths: request 0 has nodes \[0, 1, -1\], must ascend"),
        (paths + 1, kept, r"paths: request 0 has nodes \[1, 3, 5\], must .* lie in 0..4"),
    ):
        with pytest.raises(ValueError, match=message):
            compact_paths(caches, batch, changed_paths, changed_kept)
    for shape in ((2, 12, 8, 1, 8), (2, 1, 4, 1, 8)):
        with pytest.raises(ValueError, match=r"caches\[0\]: must have pages of 4 slots and more"):
            compact_paths([torch.zeros(shape)], batch, paths, kept)
