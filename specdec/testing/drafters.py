"""Scripted drafters: guesses whose quality a test chooses.

All are deterministic: what they propose depends on their arguments, the request's tokens and, when
it samples, its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specdec_drafts.base import DraftRequest, Observation
from specdec_drafts.tree import TokenTree, TreeBuilder, root_only

Shape = int | Sequence[int]
"""Of a tree: an int is a chain of that length, a sequence the number of children at each depth."""


def branching(shape: Shape) -> tuple[int, ...]:
    """Children of each node, depth by depth."""
    return (1,) * shape if isinstance(shape, int) else tuple(shape)


class TestDrafter:
    """Base of the scripted drafters: a name, a log of observations, and no memory.

    observations: every record the engine handed back since reset, in order.
    """

    __test__ = False  # not a test case, whatever pytest makes of the name

    def __init__(self, name: str) -> None:
        self._name = name
        self.observations: list[Observation] = []

    @property
    def name(self) -> str:
        return self._name

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """One tree a request."""
        return [self.tree(request) for request in requests]

    def tree(self, request: DraftRequest) -> TokenTree:
        """The tree of one request."""
        raise NotImplementedError

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the records."""
        self.observations += observations

    def release(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def reset(self) -> None:
        """Forget the records."""
        self.observations.clear()


class ScriptedDrafter(TestDrafter):
    """Offers given token paths at every step, merged into one tree.

    paths: the paths below the root, or a function of the request that returns them.
    """

    def __init__(
        self,
        paths: Sequence[Sequence[int]] | Callable[[DraftRequest], Iterable[Sequence[int]]],
        *,
        name: str = "scripted",
        prob: float = 0.5,
    ) -> None:
        super().__init__(name)
        self._paths = paths if callable(paths) else lambda _: paths
        self._prob = prob

    def tree(self, request: DraftRequest) -> TokenTree:
        builder = TreeBuilder(request.token_ids[-1])
        for path in self._paths(request):
            node = 0
            for token in path:
                node = builder.add(node, token, self._prob)
        return builder.build()


class RandomDrafter(TestDrafter):
    """RANDOM: trees of random tokens, nearly all of them rejected.

    vocab_size: tokens are drawn below it. shape: of every tree; None draws one a step: up to
    max_nodes nodes, each hung below a node drawn at random, so chains, stars and all between occur.
    """

    def __init__(
        self,
        vocab_size: int,
        shape: Shape | None = None,
        seed: int = 0,
        *,
        max_nodes: int = 16,
        name: str = "random",
    ) -> None:
        super().__init__(name)
        self._vocab_size = vocab_size
        self._shape = None if shape is None else branching(shape)
        self._seed = seed
        self._max_nodes = max_nodes

    def tree(self, request: DraftRequest) -> TokenTree:
        rng = _rng(self._seed, request)
        builder = TreeBuilder(request.token_ids[-1])
        if self._shape is None:
            for _ in range(rng.randrange(self._max_nodes + 1)):
                parent = rng.randrange(len(builder))
                builder.add(parent, rng.randrange(self._vocab_size), rng.uniform(0.05, 1.0))
        else:
            tokens = range(self._vocab_size)
            _grow(builder, 0, self._shape, lambda n: rng.sample(tokens, min(n, len(tokens))))
        return builder.build()


class GuidedDrafter(TestDrafter):
    """Offers the continuation that `guess` returns, hidden among decoys.

    guess: of a request and a depth, the tokens to come, at most that many (fewer means "unknown").
    shape: of the tree; at every node of the guessed path the right child stands at a random place
    among the siblings, the others being decoys with random tokens and children of their own, and
    all have random estimates.
    accuracy: probability that the guessed token of a depth is offered at all; below a miss there
    are only decoys.
    """

    def __init__(
        self,
        guess: Callable[[DraftRequest, int], Sequence[int]],
        vocab_size: int,
        shape: Shape,
        *,
        accuracy: float = 1.0,
        seed: int = 0,
        name: str,
    ) -> None:
        super().__init__(name)
        self._guess = guess
        self._vocab_size = vocab_size
        self._shape = branching(shape)
        self._accuracy = accuracy
        self._seed = seed

    def tree(self, request: DraftRequest) -> TokenTree:
        path = self._guess(request, len(self._shape))
        if not path:
            return root_only(request.token_ids[-1])
        rng = _rng(self._seed, request)
        builder = TreeBuilder(request.token_ids[-1])

        def decoys(count: int, avoid: int | None = None) -> list[int]:
            tokens = rng.sample(range(self._vocab_size), min(count + 1, self._vocab_size))
            return [token for token in tokens if token != avoid][:count]

        node: int = 0
        for depth, token in enumerate(path):
            hit = rng.random() < self._accuracy
            width = self._shape[depth]
            siblings = decoys(width - 1 if hit else width, avoid=token)
            if hit:
                siblings.insert(rng.randrange(len(siblings) + 1), token)
            next_node = 0
            for sibling in siblings:
                # Estimates that know nothing of the truth: the accepted path is then seldom the
                # principal one, so it has to be moved into place.
                child = builder.add(node, sibling, rng.uniform(0.2, 0.9))
                if sibling == token:
                    next_node = child
                else:
                    _grow(builder, child, self._shape[depth + 1 :], decoys)
            if not hit:
                break
            node = next_node
        return builder.build()


class OracleDrafter(GuidedDrafter):
    """Replays known answers: SELF at no cost, at any temperature and with any penalty.

    answers: prompt ids to answer ids, or (seed, prompt ids) to answer ids where seeds matter.
    Offers nothing once a request has left its answer.
    """

    def __init__(
        self,
        answers: Mapping[Any, Sequence[int]],
        vocab_size: int,
        shape: Shape,
        *,
        accuracy: float = 1.0,
        seed: int = 0,
        name: str = "oracle",
    ) -> None:
        self.answers = answers
        super().__init__(
            self._known, vocab_size, shape, accuracy=accuracy, seed=seed, name=name
        )  # fmt: skip

    def _known(self, request: DraftRequest, depth: int) -> Sequence[int]:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        answer = self.answers.get((request.seed, prompt), self.answers.get(prompt, ()))
        done = len(request.token_ids) - request.num_prompt_tokens
        if list(answer[:done]) != list(request.token_ids[request.num_prompt_tokens :]):
            return ()
        return answer[done : done + depth]


class SelfDrafter(GuidedDrafter):
    """SELF: the target's own greedy continuation, so every greedy draft is accepted.

    model: a transformers causal LM (the target's weights; it is run by itself, step by step).
    shape: of the tree; accuracy below 1 makes NOISY of it.
    """

    def __init__(
        self,
        model: Any,
        shape: Shape,
        *,
        accuracy: float = 1.0,
        seed: int = 0,
        name: str = "self",
    ) -> None:
        self._model = model
        self._room = model.config.max_position_embeddings
        self._known: dict[str, list[int]] = {}
        super().__init__(
            self._continue, model.config.vocab_size, shape,
            accuracy=accuracy, seed=seed, name=name,
        )  # fmt: skip

    def _continue(self, request: DraftRequest, depth: int) -> Sequence[int]:
        # A right guess is asked for again a step later: what is known of a request is kept, and
        # extended in larger steps while the request follows it.
        tokens = list(request.token_ids)
        known = self._known.get(request.request_id, [])
        follows = known[: len(tokens)] == tokens
        wanted = min(len(tokens) + depth, self._room)
        if not follows or len(known) < wanted:
            ahead = 4 * depth if follows else depth
            known = greedy_continuation(self._model, tokens, min(ahead, self._room - len(tokens)))
            self._known[request.request_id] = known
        return known[len(tokens) : wanted]

    def release(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def reset(self) -> None:
        super().reset()
        self._known.clear()


class NoisyDrafter(SelfDrafter):
    """NOISY: SELF whose every token is right with probability about `accuracy`."""

    def __init__(
        self, model: Any, shape: Shape, *, accuracy: float = 0.5, seed: int = 0, name: str = "noisy"
    ) -> None:
        super().__init__(model, shape, accuracy=accuracy, seed=seed, name=name)


def greedy_continuation(model: Any, token_ids: Sequence[int], count: int) -> list[int]:
    """token_ids and the model's `count` greedy tokens after them, by whole forward passes."""
    import torch

    tokens = list(token_ids)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens], device=model.device)).logits
            tokens.append(int(logits[0, -1].float().argmax()))
    return tokens


def _rng(seed: int, request: DraftRequest) -> random.Random:
    # Without the request's seed, every sample of a law check would meet the same tree. At
    # temperature 0 an unset seed is drawn anew each run and would make the trees irreproducible.
    own = request.seed if request.temperature > 0 else 0
    return random.Random(f"{seed}/{own}/{len(request.token_ids)}/{tuple(request.token_ids[-4:])}")


def _grow(
    builder: TreeBuilder, node: int, shape: Sequence[int], draw: Callable[[int], Sequence[int]]
) -> None:
    """Hang a full tree of the given shape below node, with tokens from draw(count)."""
    if not shape:
        return
    for token in draw(shape[0]):
        _grow(builder, builder.add(node, token, 0.3), shape[1:], draw)


CHAIN, TREE = 5, (3, 2, 2)
DRAFT_KINDS = (
    "none", "ngram", "self-chain", "self-tree", "noisy-tree", "random-chain", "random-tree",
)  # fmt: skip
"""Kinds of drafts that an exactness test runs through; see `draft_of_kind`."""


def draft_of_kind(
    kind: str, model: Any, answers: Mapping[Any, Sequence[int]] | None = None
) -> str | TestDrafter:
    """The value of `LLM(draft=...)` for a kind of DRAFT_KINDS.

    answers: what the target says where that is known (keys as in OracleDrafter); the self and noisy
    kinds then replay it rather than run the model.
    Raises ValueError for another kind.
    """
    vocab_size = model.config.vocab_size
    if kind in ("none", "ngram"):
        return kind
    if kind == "random-chain":
        return RandomDrafter(vocab_size, CHAIN)
    if kind == "random-tree":
        return RandomDrafter(vocab_size)
    shapes: dict[str, Shape] = {"self-chain": CHAIN, "self-tree": TREE, "noisy-tree": TREE}
    if kind not in shapes:
        raise ValueError(f"no such kind of draft: {kind!r}")
    accuracy = 0.5 if kind.startswith("noisy") else 1.0
    if answers is not None:
        return OracleDrafter(answers, vocab_size, shapes[kind], accuracy=accuracy)
    return SelfDrafter(model, shapes[kind], accuracy=accuracy)
