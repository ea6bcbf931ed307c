"""Counter-based random words: the same for a request, position and token on every device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_U64 = 2**64 - 1


def philox_words(seed: int, stream: int, position: int, num_tokens: int) -> NDArray[np.uint32]:
    """Philox4x64-10 words of the tokens 0 .. num_tokens - 1 at one absolute position.

    Token x reads 32-bit word x % 8 (low half of each 64-bit word first) of the block whose counter
    is (x // 8, position, 0, 0) under the key (seed, stream); Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011.

    seed, stream, position: integers in 0 .. 2**64 - 1. Streams: 0 the law, 1 drafts, 2 coins.
    Returns uint32 [num_tokens].
    """
    # numpy advances its 256-bit counter before each block, so it starts one before (0, position).
    start = [_U64, position - 1, 0, 0] if position > 0 else [_U64] * 4
    generator = np.random.Philox(
        key=np.array([seed, stream], dtype=np.uint64),
        counter=np.array(start, dtype=np.uint64),
    )
    num_words = (num_tokens + 1) // 2
    words = np.asarray(generator.random_raw(num_words), dtype="<u8")
    return words.view("<u4")[:num_tokens].astype(np.uint32, copy=False)
