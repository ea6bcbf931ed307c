"""The check at load that flat ragged rows give what the stock module gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec.errors import ModelError
from specdec.model.skeleton import shared_copy
from specdec.runner import TargetRunner, flat_batch
from specdec_kernels import TreeBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LONGEST = 1024
"""Longest window crossed: running past a longer one would take too long."""

_PAGE_SIZE = 16
_TREE = (-1, 0, 0, 1, 1, 2, 3)
"""Parents of the tree that the second request carries."""


@torch.inference_mode()
def probe(model: PreTrainedModel, runner: TargetRunner, max_model_len: int) -> None:
    """Compare one flat batch of two requests, one with a tree, against the untouched module.

    Both requests are longer than every sliding window up to 1024; that longer windows reach
    attention as the masks have them was checked when the runner was made. Replaces the runner's KV
    tensors. Raises ModelError if logits differ by more than rounding, with the likely reason.
    """
    limit = max_model_len - len(_TREE)
    if limit < 2:
        raise ModelError(f"a context of {max_model_len} tokens is too short to serve")
    try:
        error = _relative_error(model, runner, limit)
    except ModelError as problem:
        raise ModelError(f"{type(model).__name__} cannot be served: {problem}") from problem
    except Exception as problem:
        first_line = (str(problem).splitlines() or [""])[0]
        raise ModelError(
            f"{type(model).__name__} cannot be served: it does not run over a flat batch of two "
            f"requests ({type(problem).__name__}: {first_line})"
        ) from problem
    allowed = 1e-3 if runner.dtype in (torch.float32, torch.float64) else 6e-2
    if not error <= allowed:
        raise ModelError(
            f"{type(model).__name__} cannot be served: a flat batch with a tree gives other logits "
            f"than its texts alone (relative error {error:.1e}, allowed {allowed:.0e}): "
            f"{runner.explain()}"
        )


def _relative_error(model: PreTrainedModel, runner: TargetRunner, limit: int) -> float:
    """Of a chain's last row and all rows of a tree; the texts take at most `limit` tokens."""
    windows = [window for window in runner.windows if window <= _LONGEST]
    lengths = [min(limit, max([16, *windows]) + 8), min(limit, max([8, *windows]) + 3)]
    generator = torch.Generator().manual_seed(0)
    top = runner.vocab_size

    def tokens(count: int) -> list[int]:
        return torch.randint(0, top, (count,), generator=generator).tolist()

    chain, prefix, tree = tokens(lengths[0]), tokens(lengths[1]), tokens(len(_TREE))
    tables, num_pages = [], 0
    for length in (len(chain), len(prefix) + len(tree)):
        needed = -(-length // _PAGE_SIZE)
        tables.append(list(range(num_pages, num_pages + needed)))
        num_pages += needed
    runner.allocate(num_pages, _PAGE_SIZE)

    def flat(parents: list[list[int] | int], committed: list[int]) -> TreeBatch:
        return TreeBatch.from_lists(parents, committed, tables, _PAGE_SIZE, runner.device)

    half = len(chain) // 2
    first = flat([half, len(prefix)], [0, 0])
    runner.score(flat_batch(chain[:half] + prefix, first, [], runner.device))
    second = flat([len(chain) - half, list(_TREE)], [half, len(prefix)])
    rows = [len(chain) - half - 1, *range(len(chain) - half, len(chain) - half + len(tree))]
    got = runner.score(flat_batch(chain[half:] + tree, second, rows, runner.device)).float()
    # The module as it is, but in eval mode: a copy, so that the user's is not switched.
    stock = shared_copy(model)
    if runner.has_softcap:
        # SDPA cannot cap scores: some versions of transformers refuse, others leave it out.
        stock.set_attn_implementation("eager")
    paths = [chain] + [prefix + [tree[node] for node in _path(leaf)] for leaf in range(len(tree))]
    want = torch.stack([_stock_logits(stock, path) for path in paths])
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def _path(node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = _TREE[node]
    return path[::-1]


def _stock_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [V] logits after the last token."""
    ids = torch.tensor([token_ids], device=model.device)
    output = model(input_ids=ids, use_cache=False)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits
