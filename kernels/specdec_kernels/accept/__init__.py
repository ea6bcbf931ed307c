"""The walk down every tree of the batch along the law's own tokens."""

from specdec_kernels.accept.api import Accepted, accept

__all__ = ["Accepted", "accept"]
