"""write_kv as one Triton launch; imported only when chosen."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# fmt: off
@triton.jit
def write_kv_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    key_row, key_head, value_row, value_head,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    index = tl.arange(0, BLOCK)
    mask = index < HEADS * D
    head, dim = index // D, index % D
    target = slot * (HEADS * D) + index
    key = tl.load(key_ptr + row * key_row + head * key_head + dim, mask=mask)
    tl.store(key_cache_ptr + target, key, mask=mask)
    value = tl.load(value_ptr + row * value_row + head * value_head + dim, mask=mask)
    tl.store(value_cache_ptr + target, value, mask=mask)
# fmt: on


def triton_write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """As `write_kv`, without its checks; the caches must be contiguous."""
    if not key_cache.is_contiguous() or not value_cache.is_contiguous():
        raise RuntimeError("key_cache and value_cache: must be contiguous")
    num_rows, heads, head_dim = key.shape
    if not num_rows:
        return
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    write_kv_kernel[(num_rows,)](
        key, value, key_cache, value_cache, slots.contiguous(),
        *key.stride()[:2], *value.stride()[:2],
        HEADS=heads, D=head_dim, BLOCK=triton.next_power_of_2(heads * head_dim),
    )  # fmt: skip
