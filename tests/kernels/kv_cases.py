"""Rows, caches and moves for the tests of write_kv, compact_kv and compact_paths, in any form."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import TreeBatch, compact_kv, compact_paths, write_kv
from specdec_kernels.testing import random_tree

QUANTISED = (torch.int8, torch.float8_e4m3fn)
STORED = (*QUANTISED, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64)
"""Dtypes of caches that moves must carry bit by bit."""


def bits(tensor: Tensor) -> Tensor:
    """Raw bytes: NaN and negative zero count as they are."""
    return tensor.contiguous().view(torch.uint8)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bytes, which are every kind of number of the dtype."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def awkward_rows(source: torch.dtype, dtype: torch.dtype) -> Tensor:
    """[60, 24] of `source`: magnitudes of all orders, exact ties, zeros, denormals; all finite."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(60, 24, generator=generator, dtype=torch.float64)
    x[10:20] *= 10.0 ** torch.linspace(-43, 38, 10, dtype=torch.float64).unsqueeze(1)
    # Rows with scale 1 whose elements lie half way between two numbers.
    limit = 127.0 if dtype == torch.int8 else 448.0
    steps = torch.arange(24, dtype=torch.float64) - 12
    x[20:25] = steps + 0.5
    x[25] = steps * 2.0**-10
    x[26] = steps * 2.0**-5 + 2.0**-6
    x[20:27, 0] = limit
    x[27:30] = 0.0
    x[30, 1:] = 0.0
    x[31] *= 2.0**-140
    x[32] *= 2.0**-147
    x[33] = torch.finfo(torch.float32).max * torch.sign(x[33])
    # Scales are rounded down to one or two units of fp32, so that ratios exceed the limit.
    x[34] = torch.linspace(-600, 600, 24, dtype=torch.float64).round() * 2.0**-149
    x[35] = torch.linspace(-190, 190, 24, dtype=torch.float64).round() * 2.0**-149
    largest = torch.finfo(source).max
    return x.clamp(-largest, largest).to(source)


def unfit_rows(source: torch.dtype) -> Tensor:
    """[12, 24] of `source` with a NaN or an infinity in most rows."""
    x = torch.randn(12, 24, generator=torch.Generator().manual_seed(6))
    for row, bad in enumerate((float("nan"), float("inf"), float("-inf"), -float("nan")) * 2):
        x[row, row * 3] = bad
    return x.to(source)


def check_quantised_write(source: torch.dtype, dtype: torch.dtype, heads: int, impl: Any) -> None:
    """The form stores the bits that the reference stores, awkward rows included."""
    x = torch.cat([awkward_rows(source, dtype), unfit_rows(source)])
    rows = x[: len(x) // heads * heads].view(-1, heads, x.shape[1])
    slots = torch.randperm(len(rows) + 9, generator=torch.Generator().manual_seed(1))[: len(rows)]
    pages = -(-(len(rows) + 9) // 4)
    results = []
    for form in ("reference", impl):
        caches = noise(2, pages, 4, heads, x.shape[1], dtype=dtype)
        scales = noise(2, pages, 4, heads, dtype=torch.float32)
        write_kv(
            rows, rows.flip(0), caches[0], caches[1], slots,
            key_scales=scales[0], value_scales=scales[1], impl=form,
        )  # fmt: skip
        results.append((bits(caches), bits(scales)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def moved(cache: Tensor, src: list[int], dst: list[int]) -> Tensor:
    """The cache after slots moved, one group and slot after the other, through numpy."""
    page_size = cache.shape[2]
    before = bits(cache).view(*cache.shape[:3], -1).numpy()
    after = before.copy()
    for source, target in zip(src, dst, strict=True):
        for group in range(cache.shape[0]):
            old = before[group, source // page_size, source % page_size]
            after[group, target // page_size, target % page_size] = old
    return torch.from_numpy(after)


def random_moves(rng: random.Random, num_slots: int, count: int) -> tuple[list[int], list[int]]:
    """Sources that may repeat and distinct targets: chains, cycles and slots that stay."""
    kind = rng.randrange(3)
    dst = rng.sample(range(num_slots), count)
    if kind == 0:
        src = dst[1:] + dst[:1]
    elif kind == 1:
        src = rng.sample(dst, count)
    else:
        src = [rng.randrange(num_slots) for _ in range(count)]
    return src, dst


class PathCase(NamedTuple):
    """Accepted paths of a batch, and the moves between physical slots that they take."""

    batch: TreeBatch
    paths: Tensor
    num_nodes: Tensor
    moves: list[tuple[int, int]]


def random_paths(rng: random.Random, sizes: list[int], page_size: int) -> PathCase:
    """Random trees with a random path each; -n is a chain of n rows, of which some are kept."""
    trees: list[list[int] | int] = [random_tree(rng, n) if n > 0 else -n for n in sizes]
    paths = []
    for tree in trees:
        if isinstance(tree, int):
            paths.append(list(range(rng.randrange(tree + 1))))
            continue
        node, path = rng.randrange(len(tree)), []
        while node >= 0:
            path.append(node)
            node = tree[node]
        paths.append(path[::-1])
    return path_case(rng, trees, paths, page_size)


def long_paths(page_size: int) -> PathCase:
    """Paths of 50 nodes a few slots from their places: sources and targets overlap."""
    trees: list[list[int] | int] = []
    paths = []
    for shift in (1, 15, 40):
        trees.append([-1, *[0] * shift, *range(shift, shift + 49)])
        paths.append([0, *range(shift, shift + 50)])
    return path_case(random.Random(0), trees, paths, page_size)


def path_case(
    rng: random.Random, trees: list[list[int] | int], paths: list[list[int]], page_size: int
) -> PathCase:
    """The trees after random lengths on random pages; paths are padded with -1."""
    lengths = [rng.randrange(0, 3 * page_size) for _ in trees]
    rows = [tree if isinstance(tree, int) else len(tree) for tree in trees]
    counts = [-(-(length + n) // page_size) for length, n in zip(lengths, rows, strict=True)]
    pages = list(range(sum(counts) + 3))
    rng.shuffle(pages)
    tables = [[pages.pop() for _ in range(count)] for count in counts]
    width = max((len(path) for path in paths), default=0) + 1
    padded = [path + [-1] * (width - len(path)) for path in paths]
    moves = [
        (place(table, length + node, page_size), place(table, length + index, page_size))
        for table, length, path in zip(tables, lengths, paths, strict=True)
        for index, node in enumerate(path)
    ]
    return PathCase(
        TreeBatch.from_lists(trees, lengths, tables, page_size),
        torch.tensor(padded, dtype=torch.int32).view(len(trees), width),
        torch.tensor([len(path) for path in paths], dtype=torch.int32),
        moves,
    )


def place(table: list[int], logical: int, page_size: int) -> int:
    """The physical slot of a logical one."""
    return table[logical // page_size] * page_size + logical % page_size


def check_moves(cache_dtype: torch.dtype, head_dim: int, page_size: int, impl: Any) -> None:
    """compact_kv equals a loop over numpy rows for random maps, in every stack and bit."""
    rng = random.Random(head_dim * 100 + page_size)
    pages = -(-24 // page_size)
    caches = [noise(3, pages, page_size, 2, head_dim, dtype=cache_dtype, seed=i) for i in range(2)]
    caches.append(noise(3, pages, page_size, 2, dtype=torch.float32))
    src, dst = random_moves(rng, pages * page_size, rng.randrange(1, 20))
    wanted = [moved(cache, src, dst) for cache in caches]
    compact_kv(caches, torch.tensor(src), torch.tensor(dst), impl=impl)
    for cache, after in zip(caches, wanted, strict=True):
        assert torch.equal(bits(cache).view_as(after), after)


def check_paths(case: PathCase, impl: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """compact_paths equals the same moves made one after the other, all reads first."""
    batch, page_size = case.batch, case.batch.page_size
    pages = 1 + max((max(t) for t in batch.block_tables_host if t), default=0)
    caches = [noise(2, pages, page_size, 3, 5, dtype=dtype, seed=i) for i in range(2)]
    caches += [noise(2, pages, page_size, 3, dtype=torch.float32, seed=i) for i in range(3)]
    src, dst = [move[0] for move in case.moves], [move[1] for move in case.moves]
    wanted = [moved(cache, src, dst) for cache in caches]
    compact_paths(caches, batch, case.paths, case.num_nodes, impl=impl)
    for cache, after in zip(caches, wanted, strict=True):
        assert torch.equal(bits(cache).view_as(after), after)
