"""Faults of single parameters and odd prompts: A2, A7, B10, B11, F5, Q11."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec import LLM, SamplingParams, Speculation
from specdec.errors import InvalidRequestError
from specdec.testing import (
    NoisyDrafter,
    OracleDrafter,
    reference_generate,
    teacher_forced_check,
    tiny_tokenizer,
    with_eos,
)
from tests.faults.drafts import fault_drafts, speculations
from tests.faults.entries import OFF, Starter


def load_smol(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@pytest.mark.slow
@pytest.mark.smol
def test_a2_ngram_on_a_word_repeated_without_spaces(start: Starter, smol_path: Path) -> None:
    """N-gram drafts changed the greedy text, the same way on every try."""
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    params = SamplingParams(temperature=0.0, top_p=1.0, seed=42, max_tokens=32)
    prompt = tokenizer("serving" * 48)["input_ids"]
    exact = load_smol(smol_path, torch.float32)
    expected = reference_generate(exact, prompt, 32)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_smol(smol_path, dtype)
        entry = start(model, tokenizer, draft="ngram", generation_config="none")
        for nodes in (0, 1, 4, 15):
            speculation = Speculation(mode="fixed", max_nodes=nodes) if nodes else OFF
            ids = entry.ask_one(prompt, params, speculation).ids
            if dtype is torch.float32:
                assert ids == expected, nodes
            else:
                verdict = teacher_forced_check(model, prompt, ids, steps=4.0, second_opinion=exact)
                assert not verdict.violations, nodes


def test_a7_each_row_of_a_batch_is_what_it_is_alone(start: Starter, tiny: PreTrainedModel) -> None:
    """Right alone, but larger batches put one strange token into a row."""
    rng = random.Random(7)
    prompts = [[rng.randrange(512) for _ in range(rng.randint(5, 60))] for _ in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=30)
    expected = [reference_generate(tiny, prompt, 30) for prompt in prompts]
    known = {tuple(p): ids for p, ids in zip(prompts, expected, strict=True)}
    drafts = [OracleDrafter(known, 512, 4, accuracy=0.6, name="chain"),
              OracleDrafter(known, 512, (3, 2), accuracy=0.6, name="tree"),
              NoisyDrafter(tiny, 4, name="run")]  # fmt: skip
    entry = start(tiny, draft=drafts)
    for name, speculation in speculations(drafts).items():
        alone = [entry.ask_one(prompt, params, speculation).ids for prompt in prompts[:6]]
        assert alone == expected[:6], name
        together = entry.ask(prompts, params, speculation)
        assert [answer.ids for answer in together] == expected, name


def test_a7_arrivals_at_any_step(tiny: PreTrainedModel) -> None:
    rng = random.Random(8)
    prompts = [[rng.randrange(512) for _ in range(rng.randint(5, 60))] for _ in range(16)]
    expected = {str(i): reference_generate(tiny, prompt, 30) for i, prompt in enumerate(prompts)}
    known = {tuple(p): expected[str(i)] for i, p in enumerate(prompts)}
    engine = LLM(tiny, draft=OracleDrafter(known, 512, 4, accuracy=0.6), num_pages=200).engine
    got: dict[str, list[int]] = {name: [] for name in expected}
    waiting = list(got)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            name = waiting.pop(0)
            engine.add_request(
                name, prompts[int(name)], SamplingParams(temperature=0.0, max_tokens=30),
                Speculation(mode="fixed", max_nodes=4),
            )  # fmt: skip
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids
    assert got == expected


def smallest_ratio(model: Any, prompt: list[int], ids: list[int], temperature: float) -> float:
    """Least p(token) / max p over the answer, after temperature, before any other filter."""
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([prompt + ids])).logits[0].double() / temperature
    rows = rows[len(prompt) - 1 : -1]
    chosen = rows.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    return float((chosen - rows.amax(dim=1)).exp().min())


def check_b10(entry: Any, model: Any, prompt: list[int], num_seeds: int, answers: Any) -> None:
    params = [
        SamplingParams(temperature=1.5, min_p=0.5, max_tokens=64, seed=seed, ignore_eos=True)
        for seed in range(num_seeds)
    ]
    plain = entry.ask([prompt] * num_seeds, params)
    answers.update({(a.output.seed, tuple(prompt)): a.ids for a in plain})
    drafted = entry.ask([prompt] * num_seeds, params, Speculation(mode="fixed", max_nodes=5))
    assert [a.ids for a in drafted] == [a.ids for a in plain]
    assert sum(a.output.stats.num_accepted_draft_tokens for a in drafted) > 40 * num_seeds
    ratios = [smallest_ratio(model, prompt, a.ids, 1.5) for a in drafted]
    assert min(ratios) >= 0.5 - 1e-4
    assert min(ratios) < 0.7  # the filter does have something to do


def test_b10_min_p_holds_at_drafted_positions(start: Starter, tiny: PreTrainedModel) -> None:
    """min_p was dropped on verified positions and applied to the bonus token only."""
    answers: dict[Any, list[int]] = {}
    entry = start(tiny, draft=OracleDrafter(answers, 512, 5))
    check_b10(entry, tiny, [3, 1, 4, 1, 5], 20, answers)


@pytest.mark.slow
@pytest.mark.smol
def test_b10_on_the_real_model(start: Starter, smol_path: Path) -> None:
    model = load_smol(smol_path, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    answers: dict[Any, list[int]] = {}
    draft = OracleDrafter(answers, model.config.vocab_size, 5)
    entry = start(model, tokenizer, draft=draft, generation_config="none")
    check_b10(entry, model, tokenizer("Once upon a time")["input_ids"], 100, answers)


def test_b11_temperature_zero_and_nearly_zero(start: Starter, tiny: PreTrainedModel) -> None:
    """At exactly 0 the sampler returned no probabilities, and drafting failed completely."""
    prompt = [(7 * i) % 512 for i in range(20)]
    greedy = reference_generate(tiny, prompt, 64)
    with torch.inference_mode():
        rows = tiny(input_ids=torch.tensor([prompt + greedy])).logits[0, len(prompt) - 1 : -1]
    gaps = rows.topk(2).values.diff().abs().flatten()
    entry = start(tiny, draft=OracleDrafter({tuple(prompt): greedy}, 512, 5))
    on = Speculation(mode="fixed", max_nodes=5)

    def ask(temperature: float, speculation: Speculation) -> Any:
        params = SamplingParams(temperature=temperature, max_tokens=64, seed=1, logprobs=1)
        return entry.ask_one(prompt, params, speculation)

    zero = ask(0.0, on)
    assert zero.ids == greedy == ask(0.0, OFF).ids
    stats = zero.output.stats
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens >= 50
    for temperature in (1e-8, 1e-6, 1e-4):
        assert float(gaps.min()) > 20 * temperature, "the prompt has a near-tie"
        answer = ask(temperature, on)
        assert answer.ids == greedy == ask(temperature, OFF).ids, temperature
        assert all(entry.logprob <= 0 for entry in answer.output.logprobs)
    for temperature in (0.01, 1.0):
        assert ask(temperature, on).ids == ask(temperature, OFF).ids
    for temperature in (-1.0, float("nan")):
        with pytest.raises(InvalidRequestError, match="temperature"):
            ask(temperature, on)


def check_f5(entry: Any, prompt: str, banned: int, expected: list[int], names: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=15, logit_bias={banned: -100.0})
    for name, speculation in names.items():
        ids = entry.ask_one(prompt, params, speculation).ids
        assert banned not in ids, name
        assert ids == expected, name


def test_f5_a_token_biased_away_stays_away(start: Starter, tiny: PreTrainedModel) -> None:
    """The bias was applied in one code path only, so the token came back with drafts."""
    tokenizer = tiny_tokenizer(512)
    prompt = "50x 'the': the the the the"
    ids = tokenizer(prompt)["input_ids"]
    free = reference_generate(tiny, ids, 15)
    banned = free[3]
    expected = reference_generate(tiny, ids, 15, sequence_bias={(banned,): -100.0})
    assert expected != free
    # SELF offers what the target says without the bias, the banned token included.
    drafts = fault_drafts(512, {tuple(ids): free})
    entry = start(with_eos(tiny, None), tokenizer, draft=drafts)
    check_f5(entry, prompt, banned, expected, speculations(drafts))


@pytest.mark.slow
@pytest.mark.smol
def test_f5_on_the_real_model(start: Starter, smol_path: Path) -> None:
    model = load_smol(smol_path, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    prompt = "50x 'the': the the the the"
    ids = tokenizer(prompt)["input_ids"]
    (banned,) = tokenizer(" the", add_special_tokens=False)["input_ids"]
    free = reference_generate(model, ids, 15)
    assert banned in free
    expected = reference_generate(model, ids, 15, sequence_bias={(banned,): -100.0})
    drafts = fault_drafts(model.config.vocab_size, {tuple(ids): free}, lengths=(4,))
    entry = start(model, tokenizer, draft=drafts, generation_config="none")
    check_f5(entry, prompt, banned, expected, speculations(drafts))


def test_q11_empty_and_tiny_prompts(start: Starter, tiny: PreTrainedModel) -> None:
    """An empty prompt was found too late, inside the loop, and killed the engine."""
    tokenizer = tiny_tokenizer(512)
    model = with_eos(tiny, 1)
    others = [[9, 8, 7], [40, 41], [100] * 20]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    expected = [reference_generate(model, prompt, 12, eos_token_id=1) for prompt in others]
    known = {tuple(p): ids for p, ids in zip(others, expected, strict=True)}
    drafts = fault_drafts(512, known, lengths=(4,))
    entry = start(model, tokenizer, draft=drafts)
    works: list[Any] = [" ", [0], [1], [5]]
    for name, speculation in speculations(drafts).items():
        for prompt in ("", []):
            with pytest.raises(InvalidRequestError, match=r"prompt|text|input_ids"):
                entry.ask_one(prompt, params, speculation)
        answers = entry.ask([*others, *works], params, speculation)
        assert [answer.ids for answer in answers[:3]] == expected, name
        for prompt, answer in zip(works, answers[3:], strict=True):
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            assert answer.ids == reference_generate(model, ids, 12, eos_token_id=1), (name, prompt)
