"""Move rows and pages of the paged cache."""

from specdec_kernels.compact_kv.api import compact_kv, compact_paths, copy_pages

__all__ = ["compact_kv", "compact_paths", "copy_pages"]
