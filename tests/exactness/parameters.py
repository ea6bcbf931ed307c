"""Values of every sampling parameter, alone and in random combinations, and runs to compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec import LLM, SamplingParams, Speculation
from specdec.errors import InvalidRequestError
from specdec.grammar import Grammar
from specdec.output import RequestOutput
from specdec.testing import OracleDrafter, RandomDrafter

Value = Callable[[random.Random, int], dict[str, Any]]

OFF = Speculation(mode="off")
DRAFTS = ("ngram", "oracle", "random")


class NoRepeatsInARow:
    """A stateful processor: counts its calls, and forbids the token it saw last."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def clone(self) -> NoRepeatsInARow:
        return NoRepeatsInARow()

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = token_ids.shape[1]
        if self.lengths and length != self.lengths[-1] + 1:
            raise AssertionError(f"called at length {length} after {self.lengths[-1]}")
        self.lengths.append(length)
        scores = scores.clone()
        scores[0, token_ids[0, -1]] = -torch.inf
        # Depends on the number of calls, so that one too many or too few would show.
        scores[0, len(self.lengths) % scores.shape[1]] += 3.0
        return scores


def _ids(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return rng.sample(range(4, vocab_size), count)


VALUES: dict[str, Value] = {
    "temperature": lambda rng, v: {"temperature": rng.choice([0.0, 0.3, 1.7])},
    "top_k": lambda rng, v: {"top_k": rng.choice([1, 5, 60])},
    "top_p": lambda rng, v: {"top_p": rng.choice([0.3, 0.9, 0.99])},
    "min_p": lambda rng, v: {"min_p": rng.choice([0.01, 0.2])},
    "repetition_penalty": lambda rng, v: {"repetition_penalty": rng.choice([0.8, 1.3, 2.0])},
    "presence_penalty": lambda rng, v: {"presence_penalty": rng.choice([-0.7, 0.5, 2.0])},
    "frequency_penalty": lambda rng, v: {"frequency_penalty": rng.choice([-0.3, 0.6, 2.0])},
    "logit_bias": lambda rng, v: {
        "logit_bias": {token: rng.uniform(-20, 8) for token in _ids(rng, v, v // 5)}
    },
    "allowed_token_ids": lambda rng, v: {"allowed_token_ids": [1, *_ids(rng, v, v // 3)]},
    "bad_words": lambda rng, v: {
        "bad_words": [
            *([token] for token in _ids(rng, v, v // 5)),
            *([a, b] for a in _ids(rng, v, 40) for b in _ids(rng, v, 40)),
            " the",
        ]
    },
    "min_tokens": lambda rng, v: {
        "min_tokens": rng.choice([3, 9, 20]), "stop_token_ids": _ids(rng, v, v // 8),
    },
    "grammar": lambda rng, v: {"grammar": Grammar(regex=rng.choice(
        ["[a-z ]{3,30}", "([A-Z][a-z]+[,.] ){1,6}!", "(yes|no|perhaps) [0-9]{1,9}"]
    ))},
    "logits_processors": lambda rng, v: {"logits_processors": [NoRepeatsInARow()]},
    "seed": lambda rng, v: {"seed": rng.randrange(2**64)},
    "n": lambda rng, v: {"n": rng.choice([2, 3])},
    "stop": lambda rng, v: {"stop": rng.choice([["e"], ["an", "th", "q"], [" t", "!"]])},
    "stop_token_ids": lambda rng, v: {"stop_token_ids": _ids(rng, v, v // 20)},
    "include_stop_str_in_output": lambda rng, v: {
        "include_stop_str_in_output": True, "stop": ["e", "r", "t"],
    },
    "ignore_eos": lambda rng, v: {"ignore_eos": True, "logit_bias": {1: 9.0}},
    "max_tokens": lambda rng, v: {"max_tokens": rng.choice([1, 2, 17])},
    "skip_special_tokens": lambda rng, v: {"skip_special_tokens": False, "logit_bias": {2: 9.0}},
    "logprobs": lambda rng, v: {"logprobs": rng.choice([0, 4])},
    "prompt_logprobs": lambda rng, v: {"prompt_logprobs": rng.choice([0, 3])},
    "cache_salt": lambda rng, v: {"cache_salt": rng.choice(["a", "b"])},
}  # fmt: skip
"""For each field of SamplingParams, values drawn from a generator and a vocabulary size."""

# A bound on the answer leaves nothing to the rest of the combination.
_NEVER_COMBINED = ("seed", "max_tokens")
_AGAINST = {"ignore_eos": "grammar"}


def combination(seed: int, vocab_size: int) -> dict[str, Any]:
    """Three to nine parameters with random values, none of which excludes another."""
    rng = random.Random(seed)
    names = [name for name in VALUES if name not in _NEVER_COMBINED]
    chosen = rng.sample(names, rng.randint(3, 9))
    for name, other in _AGAINST.items():
        if name in chosen and other in chosen:
            chosen.remove(rng.choice([name, other]))
    fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.0, 1.5])}
    for name in chosen:
        for field, value in VALUES[name](rng, vocab_size).items():
            fields.setdefault(field, value)
    return fields


class Arms:
    """One engine whose requests are drafted for by one drafter or by all, or by none."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.answers: dict[tuple[int, tuple[int, ...]], Sequence[int]] = {}
        vocab_size = model.config.vocab_size
        drafts = ["ngram", OracleDrafter(self.answers, vocab_size, (3, 2, 2)),
                  RandomDrafter(vocab_size, name="random")]  # fmt: skip
        self.llm = LLM(
            model, tokenizer, draft=drafts, generation_config="none", num_pages=400,
            max_num_seqs=8,
        )  # fmt: skip

    def run(
        self, prompts: list[list[int]], params: list[SamplingParams], speculation: Speculation
    ) -> list[RequestOutput] | str:
        """All answers, or the message that refused the parameters."""
        try:
            outputs = self.llm.generate(prompts, params, speculation=speculation)
        except InvalidRequestError as error:
            return str(error)
        finally:
            self.llm.engine.check_integrity()
        return [answer for output in outputs for answer in output.outputs]

    def plain(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> list[RequestOutput] | str:
        """Without speculation; the oracle knows the answers afterwards."""
        outputs = self.run(prompts, params, OFF)
        self.answers.clear()
        if not isinstance(outputs, str):
            self.answers.update({(o.seed, o.prompt_token_ids): o.token_ids for o in outputs})
        return outputs


def said(outputs: list[RequestOutput] | str) -> Any:
    """Everything a caller sees of the answers that the law decides, log-probabilities apart."""
    if isinstance(outputs, str):
        return outputs.split(" at position")[0]
    return [
        (o.index, o.seed, o.prompt_token_ids, o.token_ids, o.text, o.finish_reason, o.stop_reason)
        for o in outputs
    ]


def logprob_values(outputs: list[RequestOutput] | str) -> list[float]:
    """All log-probabilities of answers and prompts, of chosen tokens and alternatives."""
    values = []
    for output in [] if isinstance(outputs, str) else outputs:
        for entry in (*(output.logprobs or ()), *(output.prompt_logprobs or ())):
            if entry is not None:
                values += [entry.logprob, *entry.top.values()]
    return values
