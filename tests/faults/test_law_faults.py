"""Faults in what is said: A1, A5, B2, B6, F1, G1. Names are the ids of the recorded faults."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec import SamplingParams, Speculation
from specdec.testing import (
    NoisyDrafter,
    OracleDrafter,
    RandomDrafter,
    ScriptedDrafter,
    SelfDrafter,
    assert_law,
    constant_law_model,
    markov_model,
    reference_generate,
    teacher_forced_check,
    tiny_tokenizer,
)
from tests.faults.drafts import fault_drafts, speculations
from tests.faults.entries import OFF, Starter

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def test_a1_greedy_from_a_prompt_of_one_token(start: Starter, tiny: PreTrainedModel) -> None:
    """Cache positions were advanced wrongly in the drafted loop."""
    expected = reference_generate(tiny, [10], 20)
    lengths = (1, 2, 5, 8)
    drafts = fault_drafts(512, {(10,): expected}, lengths)
    drafts += [SelfDrafter(tiny, 5, name="run-self"), NoisyDrafter(tiny, (2, 2), name="run-noisy")]
    entry = start(tiny, draft=drafts)
    for name, speculation in speculations(drafts).items():
        answer = entry.ask_one([10], GREEDY, speculation)
        assert answer.ids == expected, name
        if name.startswith("self") or name == "run-self":
            assert answer.output.stats.num_accepted_draft_tokens >= 9, name


def test_a5_exact_ties_go_to_the_lowest_id(start: Starter, tiny: PreTrainedModel) -> None:
    """One batched pass and one-by-one passes broke exact ties differently."""
    prompt = [7, 8, 9]
    plain = reference_generate(tiny, prompt, 40)
    twin = next(token for token in range(511, 0, -1) if token not in plain)
    head = tiny.get_output_embeddings().weight
    kept = head[twin].clone()
    tied = next(token for token in plain if token < twin)
    try:
        head[twin] = head[tied]
        logits = tiny(torch.tensor([prompt + plain])).logits[0, len(prompt) - 1 + plain.index(tied)]
        assert logits[twin] == logits[tied] == logits.max(), "the tie is not exact"
        drafts = fault_drafts(512, {tuple(prompt): plain})
        entry = start(tiny, draft=drafts)
        for name, speculation in speculations(drafts).items():
            params = SamplingParams(temperature=0.0, max_tokens=40)
            assert entry.ask_one(prompt, params, speculation).ids == plain, name
    finally:
        head[twin] = kept


@pytest.mark.slow
@pytest.mark.smol
def test_a5_bf16_near_ties_are_counted(
    start: Starter, smol_path: Path, record_property: Any
) -> None:
    """At temperature 0 a self-drafted run leaves plain now and then, where logits nearly tie."""
    model = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    prompts = [
        tokenizer(f"Q: Say something about the number {i}.\nA:")["input_ids"] for i in range(50)
    ]
    said: dict[Any, list[int]] = {}
    draft = OracleDrafter(said, model.config.vocab_size, 4)
    entry = start(model, tokenizer, draft=draft, num_pages=1024)
    params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
    plain = entry.ask(prompts, params)
    answers = plain
    # A request that leaves its known answer is drafted no more, so what it said instead is what
    # the second round drafts.
    for round_number in range(2):
        said |= {answer.output.prompt_token_ids: answer.ids for answer in answers}
        answers = entry.ask(prompts, params, Speculation(mode="fixed", max_nodes=4))
        flips = sum(a.ids != b.ids for a, b in zip(plain, answers, strict=True))
        verdicts = [
            # Four steps: see test_greedy.py.
            teacher_forced_check(model, prompt, answer.ids, steps=4.0, second_opinion=exact)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        near = sum(verdict.num_near_ties for verdict in verdicts)
        print(f"{flips} of 50 requests differ from plain; {near} near ties in {50 * 256} tokens")
        record_property(f"differing_requests_{round_number}", flips)
        assert not [(i, v.violations) for i, v in enumerate(verdicts) if v.violations]


@pytest.mark.statistical
@pytest.mark.parametrize(
    "count", [1500, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_b2_greedy_draft_under_a_sampled_target(start: Starter, count: int) -> None:
    """A greedy draft's softmax was used as the law it was drawn from: token 1 never appeared."""
    law = [0.5, 0.3, 0.2]
    drafts = [ScriptedDrafter([[0, 0, 0]], name="chain"), ScriptedDrafter([[0, 1], [2, 0]])]
    entry = start(
        constant_law_model(law), draft=drafts, max_num_seqs=64, max_batch_tokens=1024,
        prefix_cache=False,
    )  # fmt: skip
    if start.kind == "Generate":
        count //= 4  # a call costs more than its tokens

    for name, speculation in speculations(drafts).items():

        def sample(attempt: int, speculation: Speculation = speculation) -> list[int]:
            seeds = range(attempt * count, (attempt + 1) * count)
            params = [SamplingParams(temperature=1.0, max_tokens=3, seed=s) for s in seeds]
            answers = entry.ask([[0]] * count, params, speculation)
            return [9 * a.ids[0] + 3 * a.ids[1] + a.ids[2] for a in answers]

        joint = np.einsum("a,b,c->abc", law, law, law).ravel()
        assert_law(sample, joint.tolist(), label=name)


def two_successors(vocab_size: int, seed: int = 0) -> list[list[float]]:
    """A chain in which each token may be followed by two others only."""
    rng = random.Random(seed)
    table = []
    for _ in range(vocab_size):
        row = [0.0] * vocab_size
        first, second = rng.sample(range(vocab_size), 2)
        row[first] = 0.3 + 0.4 * rng.random()
        row[second] = 1.0 - row[first]
        table.append(row)
    return table


@pytest.mark.parametrize("seeds", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_b6_only_legal_pairs_appear(start: Starter, seeds: int) -> None:
    """On rejection the right sample was thrown away and the next row's sample used instead."""
    table = two_successors(12)
    drafts = [RandomDrafter(12, 1, name="random-1"), RandomDrafter(12, 4, name="random-4"),
              RandomDrafter(12, (4, 4), name="random-tree")]  # fmt: skip
    entry = start(markov_model(table), draft=drafts, max_num_seqs=16)
    params = [SamplingParams(temperature=0.7, max_tokens=200, seed=s) for s in range(seeds)]
    for name, speculation in speculations(drafts).items():
        answers = entry.ask([[3]] * seeds, params, speculation)
        for answer in answers:
            assert len(answer.ids) == 200, name
            for before, after in zip([3, *answer.ids], answer.ids, strict=False):
                assert table[before][after] > 0, (name, before, after)
        if name != "off":
            assert sum(a.output.stats.num_accepted_draft_tokens for a in answers) > 0, name


def penalised_greedy(
    model: PreTrainedModel, prompt: list[int], count: int, presence: float, frequency: float
) -> list[int]:
    """Greedy with OpenAI's presence and frequency penalties, on whole forward passes."""
    output: list[int] = []
    for _ in range(count):
        logits = model(torch.tensor([prompt + output])).logits[0, -1]
        for token in set(output):
            logits[token] -= presence + frequency * output.count(token)
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("penalty", ["repetition", "presence", "frequency"])
def test_f1_penalties_count_every_drafted_token(
    start: Starter, tiny: PreTrainedModel, penalty: str
) -> None:
    """Penalties got weaker the better the draft was: only a step's last token was counted."""
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.encode("the the the the")
    if penalty == "repetition":
        params = SamplingParams(temperature=0.0, max_tokens=64, repetition_penalty=1.3)
        expected = reference_generate(tiny, prompt, 64, repetition_penalty=1.3)
    else:
        size = {"presence": (2.0, 0.0), "frequency": (0.0, 2.0)}[penalty]
        params = SamplingParams(
            temperature=0.0, max_tokens=64, presence_penalty=size[0], frequency_penalty=size[1]
        )
        expected = penalised_greedy(tiny, prompt, 64, *size)
    drafts = fault_drafts(512, {tuple(prompt): expected}, (6,))
    entry = start(tiny, tokenizer, draft=drafts)
    for name, speculation in speculations(drafts).items():
        answer = entry.ask_one("the the the the", params, speculation)
        assert answer.ids == expected, name
        if name.startswith("self"):
            assert answer.output.stats.acceptance_length > 2.5, name


def test_g1_seeds_hold_in_a_mixed_batch(start: Starter) -> None:
    """A seed had no effect, or one request without a seed turned the batch into rubbish."""
    table = two_successors(40, seed=5)
    said: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    drafts = [*fault_drafts(40, said, (4,)), ScriptedDrafter([[1, 2], [3, 4, 5]])]
    entry = start(markov_model(table), draft=drafts)
    seeds = [0, 1, None, 2, None, 0, 3, None]
    params = [SamplingParams(temperature=1.0, max_tokens=40, seed=seed) for seed in seeds]
    alone = [entry.ask_one([3, 5], param).ids for param in params]
    said |= {(s, (3, 5)): ids for s, ids in zip(seeds, alone, strict=True) if s is not None}
    for name, speculation in speculations(drafts).items():
        together = entry.ask([[3, 5]] * 8, params, speculation)
        for seed, one, answer in zip(seeds, alone, together, strict=True):
            if seed is None:
                pairs = zip([5, *answer.ids], answer.ids, strict=False)
                assert all(table[before][after] > 0 for before, after in pairs), name
            else:
                assert answer.ids == one, (name, seed)
                if name.startswith("self"):
                    assert answer.output.stats.acceptance_length > 2.5, (name, seed)
        assert together[0].ids == together[5].ids, name
        unseeded = {tuple(together[i].ids) for i in (2, 4, 7)}
        assert len(unseeded) == 3, "requests without a seed share one"


@pytest.mark.slow
@pytest.mark.smol
def test_g1_seeds_hold_on_the_real_model(start: Starter, smol_path: Path) -> None:
    """G1 with the prompt of the recipe: unseeded rows are sane text."""
    model = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    prompt = (
        "Write the following phrase exactly 20 times: I will never miss any tokens.\n"
        "1: I will never miss any tokens.\n2: I will never miss any tokens.\n3:"
    )
    entry = start(model, tokenizer, draft="ngram")
    seeds = [0, 1, None, 2, None, 0, 3, None]
    params = [SamplingParams(temperature=0.1, max_tokens=40, seed=seed) for seed in seeds]
    together = entry.ask([prompt] * 8, params, Speculation(mode="fixed", max_nodes=8))
    for seed, param, answer in zip(seeds, params, together, strict=True):
        if seed is None:
            assert "never miss any tokens" in answer.output.text
        else:
            assert answer.ids == entry.ask_one(prompt, param, OFF).ids, seed
    assert together[0].ids == together[5].ids
