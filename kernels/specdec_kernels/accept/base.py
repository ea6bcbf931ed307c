"""The record that `accept` returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Accepted(NamedTuple):
    """What each request accepts and emits.

    num_accepted: int32 [R], drafted nodes accepted. path: int32 [R, max_depth + 1], the root and
    the accepted nodes, numbered within their request. emitted: int64 [R, max_depth + 1], the law's
    token at each node of the path, the last one being the bonus. Columns past num_accepted are -1.
    """

    num_accepted: Tensor
    path: Tensor
    emitted: Tensor
