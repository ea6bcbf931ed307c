"""The tiny targets are what they say: laws exact, scripts followed, ordinary checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.testing import (
    constant_law_model,
    first_seen_positions,
    greedy_continuation,
    markov_model,
    random_prompts,
    reference_generate,
    script_model,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen2,
    tiny_tokenizer,
    with_eos,
)


def law_after(model: Any, token_ids: list[int]) -> list[float]:
    logits = model(torch.tensor([token_ids])).logits[0, -1]
    law: list[float] = logits.double().softmax(-1).tolist()
    return law


def test_constant_law_holds_after_every_prompt() -> None:
    law = [0.4, 0.3, 0.2, 0.1, 0.0]
    model = constant_law_model(law)
    for prompt in ([0], [4, 1], [3] * 50):
        assert law_after(model, prompt) == pytest.approx(law, abs=1e-6)


def test_markov_law_depends_on_the_last_token() -> None:
    table = [[0.5, 0.5, 0.0], [0.0, 0.3, 0.7], [0.1, 0.0, 0.9]]
    model = markov_model(table)
    for prompt in ([0], [2, 1], [1, 0, 2]):
        assert law_after(model, prompt) == pytest.approx(table[prompt[-1]], abs=1e-6)


def test_laws_must_sum_to_one() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        constant_law_model([0.5, 0.4])


def test_script_is_said_from_its_position_on() -> None:
    model = script_model([7, 8, 9, 7], 3, vocab_size=16, max_positions=64)
    assert reference_generate(model, [1, 2, 3], 6) == [7, 8, 9, 7, 7, 8]


@pytest.mark.parametrize(
    "make",
    [
        tiny_llama,
        tiny_gpt2,
        tiny_qwen2,
        lambda: constant_law_model([0.75, 0.25]),
        lambda: markov_model([[0.9, 0.1], [0.2, 0.8]]),
    ],
)
def test_models_are_seeded_and_save_as_checkpoints(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.tensor([[1, 0, 1]])
    assert torch.equal(loaded(prompt).logits, make()(prompt).logits)


def test_building_a_model_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_llama()
    assert torch.equal(torch.rand(3), expected)


def test_with_eos_shares_weights_and_leaves_the_model_alone() -> None:
    model = tiny_llama()
    plain = reference_generate(model, [1, 2], 12)
    twin = with_eos(model, plain[4])
    first = plain.index(plain[4])
    assert reference_generate(twin, [1, 2], 12) == plain[: first + 1]
    assert reference_generate(model, [1, 2], 12) == plain
    assert twin.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


def test_first_seen_positions() -> None:
    assert first_seen_positions([5, 6, 5, 7, 6], 4) == [0, 1, 3]


def test_greedy_continuation_is_transformers_greedy() -> None:
    model = tiny_llama()
    assert greedy_continuation(model, [3, 4], 20)[2:] == reference_generate(model, [3, 4], 20)


def test_random_prompts_are_seeded() -> None:
    prompts = random_prompts(5, longest=9, seed=2)
    assert prompts == random_prompts(5, longest=9, seed=2) != random_prompts(5, longest=9, seed=3)
    assert all(1 <= len(prompt) <= 9 for prompt in prompts)


@pytest.mark.parametrize("vocab_size", [260, 512, 900])
def test_tokenizer_encodes_any_text(vocab_size: int) -> None:
    tokenizer = tiny_tokenizer(vocab_size)
    assert len(tokenizer) == vocab_size
    for text in ("the theme", " stop\n", "삼겹살 👩‍👩‍👧 世界 𝄞", "\x00\x7f", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_has_special_tokens_and_a_chat_template(tmp_path: Path) -> None:
    tiny_tokenizer(add_bos=True).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.encode("hi")[0] == 0
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text, add_special_tokens=False).count(0) == 1


def test_tokenizer_size_is_bounded() -> None:
    with pytest.raises(ValueError, match=r"260\.\.900"):
        tiny_tokenizer(100)
