"""The meaning of write_kv, in plain torch; also the CPU form."""

from __future__ import annotations

from torch import Tensor


def reference_write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """As `write_kv`, without checks."""
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)
