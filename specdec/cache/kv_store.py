"""The tensors behind the pages: keys and values of every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec_kernels import compact_kv, copy_pages


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV heads and head dimension of one attention layer."""

    num_kv_heads: int
    head_dim: int

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in this layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU from calloc, whose pages take memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


class KVStore:
    """Keys and values of all layers over one set of page ids.

    Layers of equal shape are stacked in one tensor [num_layers, num_pages, page_size, num_kv_heads,
    head_dim], keys and values apart, so that a commit moves all of them at once. Pages are zeroed
    lazily by the operating system: a pool that is not used costs no memory on a CPU.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stacks: list[torch.Tensor] = []
        groups: dict[LayerShape, tuple[torch.Tensor, torch.Tensor]] = {}
        next_index: dict[LayerShape, int] = dict.fromkeys(layers, 0)
        for layer in layers:
            if layer not in groups:
                shape = (layers.count(layer), num_pages, page_size, layer.num_kv_heads)
                keys, values = (
                    _lazy_zeros((*shape, layer.head_dim), dtype, device) for _ in range(2)
                )
                groups[layer] = (keys, values)
                self._stacks += [keys, values]
            keys, values = groups[layer]
            index = next_index[layer]
            next_index[layer] += 1
            self._views.append((keys[index], values[index]))
        self._device = device

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value cache of a layer, each [num_pages, page_size, num_kv_heads, head_dim]."""
        return self._views[index]

    def compact(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy KV of all layers from slot to slot; all reads happen before the first write."""
        if moves:
            source, target = torch.tensor(moves, dtype=torch.int64, device=self._device).unbind(1)
            compact_kv(self._stacks, source, target)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages of all layers, (source, target) each."""
        if copies:
            source, target = torch.tensor(copies, dtype=torch.int64, device=self._device).unbind(1)
            copy_pages(self._stacks, source, target)
