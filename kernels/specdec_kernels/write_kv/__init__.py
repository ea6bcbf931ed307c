"""Scatter new keys and values into the paged cache."""

from specdec_kernels.write_kv.api import write_kv

__all__ = ["write_kv"]
