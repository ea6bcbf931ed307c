"""write_kv, compact_kv and copy_pages: right contents, and not a bit changed elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec_kernels import compact_kv, copy_pages, write_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits(tensor: Tensor) -> Tensor:
    """Raw bytes: NaN and negative zero count as they are."""
    return tensor.contiguous().view(torch.uint8)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    tensor = torch.randn(shape, generator=generator).to(dtype)
    return tensor.masked_fill_(torch.rand(shape, generator=generator) < 0.2, float("nan"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_writes_its_slots_only(dtype: torch.dtype) -> None:
    key, value = poisoned(2, 5, 3, 8, dtype=dtype)
    key_cache, value_cache = poisoned(2, 6, 4, 3, 8, dtype=dtype)
    slots = torch.tensor([3, 23, 0, 17, 8])
    expected = [key_cache.clone(), value_cache.clone()]
    for row, slot in enumerate(slots.tolist()):
        expected[0][slot // 4, slot % 4] = key[row]
        expected[1][slot // 4, slot % 4] = value[row]
    write_kv(key, value, key_cache, value_cache, slots)
    assert torch.equal(bits(key_cache), bits(expected[0]))
    assert torch.equal(bits(value_cache), bits(expected[1]))


def test_write_kv_takes_strided_rows_and_no_rows() -> None:
    wide = torch.randn(4, 2, 3, 8)
    caches = torch.zeros(2, 2, 4, 3, 8)
    write_kv(wide[:, 0], wide[:, 1], caches[0], caches[1], torch.arange(4))
    assert torch.equal(caches[0, 0], wide[:, 0])
    assert torch.equal(caches[1, 0], wide[:, 1])
    before = caches.clone()
    write_kv(wide[:0, 0], wide[:0, 1], caches[0], caches[1], torch.arange(0))
    assert torch.equal(caches, before)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("key", torch.zeros(5, 2, 8), "key and value: must be"),
        ("value", torch.zeros(5, 3, 4), "key and value: must be"),
        ("key_cache", torch.zeros(24, 3, 8), "key_cache and value_cache: must have one shape"),
        ("value_cache", torch.zeros(6, 4, 3, 4), "key_cache and value_cache: must have one shape"),
        ("slots", torch.zeros(5, dtype=torch.int32), "slots: must be int64"),
        ("slots", torch.arange(4), "slots: must be int64"),
        ("value", torch.zeros(5, 3, 8, dtype=torch.float16), "must have one dtype"),
    ],
)
def test_write_kv_refuses(argument: str, value: Tensor, message: str) -> None:
    arguments = {
        "key": torch.zeros(5, 3, 8),
        "value": torch.zeros(5, 3, 8),
        "key_cache": torch.zeros(6, 4, 3, 8),
        "value_cache": torch.zeros(6, 4, 3, 8),
        "slots": torch.arange(5),
    }
    write_kv(**arguments)
    with pytest.raises(ValueError, match=message):
        write_kv(**(arguments | {argument: value}))


@pytest.mark.parametrize("dtype", DTYPES)
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
def test_compact_kv_reads_everything_before_it_writes(
    src: list[int], dst: list[int], dtype: torch.dtype
) -> None:
    caches = [poisoned(4, 6, 4, 3, 8, dtype=dtype), poisoned(2, 6, 4, 1, 16, dtype=dtype)]
    before = [cache.clone() for cache in caches]
    expected = [cache.clone() for cache in caches]
    for source, target in zip(src, dst, strict=True):
        for old, new in zip(before, expected, strict=True):
            new[:, target // 4, target % 4] = old[:, source // 4, source % 4]
    compact_kv(caches, torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits(cache), bits(wanted))


def test_copy_pages_copies_whole_pages_in_every_group() -> None:
    caches = [poisoned(3, 6, 4, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    for wanted in expected:
        wanted[:, [1, 4]] = wanted[:, [4, 0]]
    copy_pages(caches, torch.tensor([4, 0]), torch.tensor([1, 4]))
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits(cache), bits(wanted))


@pytest.mark.parametrize("move", [compact_kv, copy_pages])
def test_moves_refuse_wrong_shapes(move: Callable[..., None]) -> None:
    caches = [torch.zeros(2, 3, 4, 1, 8)]
    one = torch.tensor([1])
    with pytest.raises(ValueError, match=r"caches\[1\]: must be \[num_groups"):
        move([caches[0], caches[0][0]], one, one)
    with pytest.raises(ValueError, match="must be int64 of one length"):
        move(caches, one, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="must be int64 of one length"):
        move(caches, one.int(), one.int())


def test_moves_refuse_a_cache_they_could_only_copy() -> None:
    strided = torch.zeros(2, 3, 8, 1, 8)[:, :, :4]
    with pytest.raises(RuntimeError):
        compact_kv([strided], torch.tensor([1]), torch.tensor([0]))
