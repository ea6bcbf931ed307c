"""The walk: from the root down the law's own tokens for as long as the tree carries them."""

from __future__ import annotations

from specdec.request_state import Request
from specdec.step import RowLogits, Verdict
from specdec_drafts.tree import TokenTree


def walk(request: Request, tree: TokenTree, logits: RowLogits) -> Verdict:
    """Emit the law's token at the root, descend to the child that carries it, and so on.

    logits: row i is node i's. The law is evaluated at visited nodes only, in order, each with the
    history of its own path, which is the request's history by then. Ends at the first token that no
    child carries, or at the token that ends the request.

    Mutates the request: history, answer (tokens, text, finish reason) and token_ids.
    Raises ValueError if a visited row's logits are not finite; tokens emitted before it stand.
    """
    children = {
        (tree.parents[node], tree.token_ids[node]): node for node in range(1, tree.num_nodes)
    }
    node = 0
    path, emitted = [0], []
    while True:
        choice = request.law.choose(logits.row(node), len(request.token_ids))
        request.law.append(choice.token_id)
        request.token_ids.append(choice.token_id)
        emitted.append(choice.token_id)
        if request.answer.append(choice.token_id, choice.logprobs) is not None:
            break
        child = children.get((node, choice.token_id))
        if child is None:
            break
        node = child
        path.append(node)
    return Verdict(tree, path, emitted)
