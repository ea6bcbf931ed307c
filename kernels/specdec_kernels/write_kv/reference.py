"""The meaning of write_kv, in plain torch; runs everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels.quantise import quantise


def reference_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """As `write_kv`, without checks but that of the slots' range."""
    if slots.device.type == "cpu" and slots.numel():
        check_range(slots, key_cache.shape[0] * key_cache.shape[1])
    _write(key, key_cache, key_scales, slots)
    _write(value, value_cache, value_scales, slots)


def _write(rows: Tensor, cache: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    if scales is None:
        rows = rows.to(cache.dtype)
    else:
        rows, row_scales = quantise(rows, cache.dtype)
        scales.view(-1, scales.shape[2]).index_copy_(0, slots, row_scales)
        # Bytes, because torch has no index_copy_ for fp8.
        rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)


def check_range(slots: Tensor, num_slots: int) -> None:
    """Raises ValueError if a slot lies outside a cache of `num_slots`."""
    lowest, highest = (int(end) for end in torch.aminmax(slots))
    if lowest < 0 or highest >= num_slots:
        raise ValueError(
            f"slots: must lie in 0..{num_slots - 1}, the cache's pages, got {lowest}..{highest}"
        )
