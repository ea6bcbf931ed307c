"""The paged KV cache: pages, block tables, prefix reuse and the tensors behind them."""

from specdec.cache.block_table import BlockTable
from specdec.cache.kv_store import KVStore, LayerShape
from specdec.cache.manager import CacheManager
from specdec.cache.pages import IntegrityError, OutOfPagesError, PagePool

__all__ = [
    "BlockTable",
    "CacheManager",
    "IntegrityError",
    "KVStore",
    "LayerShape",
    "OutOfPagesError",
    "PagePool",
]
