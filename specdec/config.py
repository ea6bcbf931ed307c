"""Settings of an engine, checked once and never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.errors import InvalidRequestError
from specdec.request import Speculation
from specdec.sampling.logprobs import LOGPROBS_MODES

_ATTENTION = ("auto", "reference", "cpu", "triton")
_SIZES = ("max_model_len", "num_pages", "max_num_seqs", "max_batch_tokens", "max_chunk_tokens")

CHUNK_CONTEXT = 2048
"""Tokens before a row at which its attention costs about as much as all else it costs, measured on
a small model on a CPU. A constant, since chunks that followed the clock would make the last bits of
a prompt's keys and values depend on it."""

MIN_CHUNK_TOKENS = 16
"""Rows of a prompt that a step computes at least, if it has so many left; what streams allow is
rounded to multiples of it."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine is sized and what it does by default.

    max_model_len: most tokens of prompt and output together; None = the model's own limit.
    page_size: slots of a page, a power of two from 1 to 128.
    num_pages: pages of the pool; None sizes it from the machine's memory.
    max_num_seqs: requests that run at once; more wait.
    max_batch_tokens: rows of a step at most: prompt chunks and trees share it.
    max_chunk_tokens: rows of prompts in a step while other requests are decoding, so that their
        streams keep moving; fewer where the prompt is long already (CHUNK_CONTEXT), and for the
        last prompt of the step MIN_CHUNK_TOKENS whatever is left.
    prefix_cache: keep full pages of finished requests for prompts that begin alike.
    logprobs_mode: what log-probabilities are computed from (specdec.sampling.logprobs).
    speculation: for requests that bring none.
    attention: implementation of tree_attention ("auto" picks by device).
    pack_linears: lay the linear weights out for few rows where that is faster (bf16 on a CPU). A
        model given as a loaded module keeps its own weights beside the packed ones.

    Raises InvalidRequestError naming the field and its range.
    """

    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    max_num_seqs: int = 16
    max_batch_tokens: int = 512
    max_chunk_tokens: int = 128
    prefix_cache: bool = True
    logprobs_mode: str = "raw_logprobs"
    speculation: Speculation = field(default_factory=Speculation)
    attention: str = "auto"
    pack_linears: bool = True

    def __post_init__(self) -> None:
        if self.page_size not in {1, 2, 4, 8, 16, 32, 64, 128}:
            raise InvalidRequestError(
                "page_size", f"must be a power of two from 1 to 128, got {self.page_size!r}"
            )
        for name in _SIZES:
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "num_pages"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequestError(name, f"must be a positive integer, got {value!r}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise InvalidRequestError(
                "max_batch_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}): every running request needs "
                f"a row a step, got {self.max_batch_tokens}",
            )
        if self.attention not in _ATTENTION:
            raise InvalidRequestError(
                "attention", f"must be one of {', '.join(_ATTENTION)}, got {self.attention!r}"
            )
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise InvalidRequestError(
                "logprobs_mode",
                f"must be one of {', '.join(LOGPROBS_MODES)}, got {self.logprobs_mode!r}",
            )
