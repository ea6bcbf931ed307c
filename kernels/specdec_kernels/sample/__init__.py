"""The law's tail: temperature, top-k, top-p, min-p, counter-based noise and argmax."""

from specdec_kernels.sample.api import sample
from specdec_kernels.sample.base import Penalties, SampleOutput
from specdec_kernels.sample.philox import philox_words
from specdec_kernels.sample.reference import choose_token, gumbel_noise, surviving_tokens

__all__ = [
    "Penalties",
    "SampleOutput",
    "choose_token",
    "gumbel_noise",
    "philox_words",
    "sample",
    "surviving_tokens",
]
