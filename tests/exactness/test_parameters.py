"""Every sampling parameter, alone and combined: speculation on = off, greedy = transformers."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, PreTrainedModel

from specdec import SamplingParams, Speculation
from specdec.testing import reference_generate, tiny_llama, tiny_tokenizer, with_eos
from tests.exactness.parameters import (
    DRAFTS,
    VALUES,
    Arms,
    NoRepeatsInARow,
    combination,
    logprob_values,
    said,
)

NUM_COMBINATIONS = 40
LENGTH = 40


@pytest.fixture(scope="module")
def arms() -> Arms:
    """TINY with a tokenizer and two EOS ids that it does emit."""
    return Arms(with_eos(tiny_llama(), [1, 333]), tiny_tokenizer(512))


def compare(arms: Arms, prompts: list[list[int]], fields: dict[str, Any], kinds: Any) -> None:
    """Speculation off against each kind of draft: the same texts, ids, ends and numbers."""
    fields = {"max_tokens": LENGTH, **fields}
    params = [SamplingParams(**{"seed": 1000 + i, **fields}) for i in range(len(prompts))]
    plain = arms.plain(prompts, params)
    for kind in kinds:
        drafts = None if kind == "all" else [kind]
        speculation = Speculation(mode="fixed", max_nodes=31, max_depth=8, drafts=drafts)
        outputs = arms.run(prompts, params, speculation)
        assert said(outputs) == said(plain), (kind, fields)
        assert logprob_values(outputs) == pytest.approx(logprob_values(plain), abs=1e-4), kind
        if kind in ("oracle", "random") and not isinstance(outputs, str):
            longest = max(len(output.token_ids) for output in outputs)
            assert longest < 3 or any(o.stats.num_draft_tokens for o in outputs), kind


@pytest.mark.parametrize("name", VALUES)
def test_a_parameter_alone(name: str, arms: Arms, tiny_prompts: list[list[int]]) -> None:
    """Speculation on = off, and the parameter does change what is said or shown."""
    fields = {"temperature": 1.0, **VALUES[name](random.Random(name), 512)}
    compare(arms, tiny_prompts[:4], fields, DRAFTS)
    without = {field: value for field, value in fields.items() if field != name}
    with_it, without_it = (
        arms.plain(tiny_prompts[:4], [SamplingParams(**{"seed": 1, "max_tokens": LENGTH, **f})] * 4)
        for f in (fields, without)
    )
    shown = [(said(outputs), logprob_values(outputs)) for outputs in (with_it, without_it)]
    assert (shown[0] == shown[1]) == (name == "cache_salt")


@pytest.mark.parametrize("seed", range(NUM_COMBINATIONS))
def test_random_combinations(seed: int, arms: Arms, tiny_prompts: list[list[int]]) -> None:
    prompts = tiny_prompts[4 + seed % 20 :][:3]
    compare(arms, prompts, combination(seed, 512), ("oracle", "all"))


def test_combinations_do_speak(arms: Arms, tiny_prompts: list[list[int]]) -> None:
    """Most combinations leave tokens to choose from, and every parameter is in some of them."""
    combinations = [combination(seed, 512) for seed in range(NUM_COMBINATIONS)]
    missing = {name for name in VALUES if not any(name in fields for fields in combinations)}
    assert missing <= {"seed", "max_tokens"}
    refused = 0
    for fields in combinations:
        params = [SamplingParams(**{"max_tokens": 24, "seed": 1, **fields})]
        refused += isinstance(arms.plain(tiny_prompts[:1], params), str)
    assert refused <= NUM_COMBINATIONS // 4


def test_every_field_is_covered() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(VALUES)


GREEDY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "logit_bias": (
        {"logit_bias": {token: 4.0 - token % 9 for token in range(300)}},
        {"sequence_bias": {(token,): 4.0 - token % 9 for token in range(300)}},
    ),
    "repetition_penalty": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "bad_words": (
        {"bad_words": [[t] for t in range(30, 90)] + [[a, a + 7] for a in range(100, 400)]},
        {"bad_words_ids": [[t] for t in range(30, 90)] + [[a, a + 7] for a in range(100, 400)]},
    ),
    "min_tokens": ({"min_tokens": 25}, {"min_new_tokens": 25}),
    "allowed_token_ids": (
        {"allowed_token_ids": [1, *range(50, 300)]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [1, *range(50, 300)]},
    ),
    "logits_processors": (
        {"logits_processors": [NoRepeatsInARow()]},
        {"logits_processor": NoRepeatsInARow},
    ),
}
"""Ours and transformers' spelling of the parameters that both have."""


def _greedy_case(names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for name in names:
        ours |= GREEDY[name][0]
        theirs |= GREEDY[name][1]
    return ours, theirs


def _greedy_cases() -> list[list[str]]:
    rng = random.Random(0)
    combined = [rng.sample(list(GREEDY), rng.randint(2, len(GREEDY))) for _ in range(10)]
    return [[name] for name in GREEDY] + [sorted(names) for names in combined]


def check_greedy(arms: Arms, model: Any, prompts: list[list[int]], names: list[str]) -> None:
    ours, theirs = _greedy_case(names)
    params = [SamplingParams(temperature=0.0, seed=1, max_tokens=LENGTH, **ours)] * len(prompts)
    wanted = []
    for prompt in prompts:
        fields = dict(theirs)
        if "logits_processor" in fields:
            fields["logits_processor"] = LogitsProcessorList([fields["logits_processor"]()])
        wanted.append(reference_generate(model, prompt, LENGTH, **fields))
    outputs = arms.plain(prompts, params)
    assert not isinstance(outputs, str)
    assert [list(output.token_ids) for output in outputs] == wanted, names
    speculation = Speculation(mode="fixed", max_nodes=31, max_depth=8)
    assert said(arms.run(prompts, params, speculation)) == said(outputs)


@pytest.mark.parametrize("names", _greedy_cases(), ids="+".join)
def test_greedy_equals_transformers(
    names: list[str], arms: Arms, tiny_prompts: list[list[int]]
) -> None:
    prompts = [[7], *tiny_prompts[:2]]
    check_greedy(arms, with_eos(tiny_llama(), [1, 333]), prompts, names)


# ---- the real model ----


@pytest.fixture(scope="module")
def smol(smol_path: Path) -> tuple[PreTrainedModel, Arms]:
    model = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.float32).eval()
    return model, Arms(model, AutoTokenizer.from_pretrained(smol_path))


@pytest.mark.slow
@pytest.mark.smol
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", VALUES)
def test_a_parameter_alone_on_smol(
    name: str, smol: tuple[PreTrainedModel, Arms], smol_prompts: list[list[int]]
) -> None:
    fields = VALUES[name](random.Random(name), 49152)
    compare(smol[1], smol_prompts[:3], {"temperature": 1.0, **fields}, ("oracle", "all"))


@pytest.mark.slow
@pytest.mark.smol
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(NUM_COMBINATIONS))
def test_random_combinations_on_smol(
    seed: int, smol: tuple[PreTrainedModel, Arms], smol_prompts: list[list[int]]
) -> None:
    prompts = smol_prompts[seed : seed + 2]
    compare(smol[1], prompts, combination(seed, 49152), ("oracle", "all"))


@pytest.mark.slow
@pytest.mark.smol
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", _greedy_cases(), ids="+".join)
def test_greedy_equals_transformers_on_smol(
    names: list[str], smol: tuple[PreTrainedModel, Arms], smol_prompts: list[list[int]]
) -> None:
    check_greedy(smol[1], smol[0], smol_prompts[:3], names)
