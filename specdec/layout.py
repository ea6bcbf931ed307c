"""The flat rows of a step: prompt chunks and trees, one request after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from specdec.runner import flat_batch
from specdec.step import FlatBatch, JudgedEntry, StepPlan
from specdec_drafts import TokenTree
from specdec_kernels import TreeBatch


def lay_out(
    plan: StepPlan, trees: Mapping[str, TokenTree], page_size: int, device: torch.device
) -> tuple[FlatBatch, list[JudgedEntry]]:
    """Rows of the step, and where the logits of each entry are.

    trees: by request id, of every entry that is judged. A decoding request's rows are its tree; any
    other's are the chain of its pending tokens, of which only the last is judged.
    """
    token_ids: list[int] = []
    parents: list[Sequence[int] | int] = []
    judged: list[int] = []
    entries: list[JudgedEntry] = []
    for entry in plan.entries:
        request, first_row = entry.request, len(token_ids)
        num_prompt_rows = 0
        if entry.is_judged and entry.num_pending == 1:
            tree = trees[request.request_id]
            token_ids.extend(tree.token_ids)
            parents.append(tree.parents)
            rows: Sequence[int] = range(tree.num_nodes)
        else:
            start = request.num_computed
            token_ids.extend(request.token_ids[start : start + entry.num_pending])
            parents.append(entry.num_pending)
            rows = [entry.num_pending - 1] if entry.is_judged else []
        if request.prompt_logprobs is not None:
            wanted = request.prompt_logprobs.wanted(request.num_computed, entry.num_pending)
            num_prompt_rows = len(wanted)
            rows = [*wanted, *rows]
        entries.append(JudgedEntry(entry, len(judged), num_prompt_rows))
        judged.extend(first_row + row for row in rows)
    batch = TreeBatch.from_lists(
        parents,
        [entry.request.num_computed for entry in plan.entries],
        [entry.request.block_table.pages for entry in plan.entries],
        page_size,
        device,
    )
    return flat_batch(token_ids, batch, judged, device), entries
