"""Vocabularies that differ in size or meaning between target, tokenizer and draft.

Fault row K1 (vllm#7252, vllm#5203): one tokenizer, embeddings padded to different sizes. Row K3
(sglang#23838, llama.cpp#3812): a draft of another family taken without warning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specdec import LLM, SamplingParams
from specdec.errors import ModelError
from specdec.testing import (
    ScriptedDrafter,
    SelfDrafter,
    assert_law,
    constant_law_model,
    random_prompts,
    reference_generate,
    tiny_llama,
    tiny_tokenizer,
)
from specdec_drafts import DraftRequest, TokenTree, TreeBuilder, registry
from tests.model import tiny

TARGET_SIZE, NUM_TOKENS = 520, 500


class BoldDrafter:
    """The target's own continuation, with siblings and children that no embedding row stands for.

    token_ids: what to hang beside every node of the right path.
    """

    def __init__(self, model: Any, token_ids: Sequence[int], name: str = "bold") -> None:
        self._right = SelfDrafter(model, 4)
        self._token_ids = token_ids
        self.name = name

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._bold(tree) for tree in self._right.propose(requests)]

    def _bold(self, right: TokenTree) -> TokenTree:
        builder, node = TreeBuilder(right.token_ids[0]), 0
        for token in right.token_ids[1:]:
            for wrong in self._token_ids:
                builder.add(node, wrong, 0.2)
            node = builder.add(node, token, 0.9)
        return builder.build()

    def observe(self, observations: Sequence[Any]) -> None:
        self._right.observe(observations)

    def release(self, request_id: str) -> None:
        self._right.release(request_id)

    def reset(self) -> None:
        self._right.reset()


def watch_embedding(model: Any) -> list[int]:
    """Largest id of each pass that reaches the embedding, also in an engine's copy of the model."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, arguments: seen.append(int(arguments[0].max()))
    )
    return seen


PADDED = range(NUM_TOKENS, TARGET_SIZE)
BEYOND = [TARGET_SIZE, TARGET_SIZE + 7, 1 << 40]


@pytest.mark.parametrize("ids", [PADDED, BEYOND, [*PADDED, *BEYOND]], ids=["pad", "beyond", "both"])
def test_k1_greedy(ids: Sequence[int]) -> None:
    model = tiny_llama(vocab_size=TARGET_SIZE)
    prompts = random_prompts(3, vocab_size=NUM_TOKENS, longest=12, seed=1)
    expected = [reference_generate(model, prompt, 24) for prompt in prompts]
    drafter = BoldDrafter(tiny_llama(vocab_size=TARGET_SIZE), ids[:6])
    seen = watch_embedding(model)
    llm = LLM(model, tiny_tokenizer(NUM_TOKENS), draft=["ngram", drafter])
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == expected
    assert seen
    assert max(seen) < TARGET_SIZE
    # The right guesses beside and above the impossible ones are scored, and accepted.
    assert all(output.stats.acceptance_length > 1.5 for output in outputs)


def test_k1_padding_rows_may_be_said() -> None:
    """A padding row can be the argmax of a random model: it is emitted, and has no text."""
    model = tiny_llama(vocab_size=TARGET_SIZE)
    with torch.no_grad():
        model.lm_head.weight[NUM_TOKENS:] *= 4.0
    prompts = random_prompts(2, vocab_size=TARGET_SIZE, longest=12, seed=2)
    expected = [reference_generate(model, prompt, 24) for prompt in prompts]
    assert any(token >= NUM_TOKENS for ids in expected for token in ids)
    llm = LLM(model, tiny_tokenizer(NUM_TOKENS), draft="ngram")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for output, ids in zip(llm.generate(prompts, params), expected, strict=True):
        assert list(output.token_ids) == ids
        assert output.text == llm.engine.tokenizer.decode(  # type: ignore[union-attr]
            [token for token in ids if token < NUM_TOKENS]
        )


@pytest.mark.statistical
def test_k1_law() -> None:
    """T = 1: frequencies follow the target's law, whatever impossible ids are drafted."""
    law = [0.4, 0.3, 0.2, 0.1]
    model = constant_law_model([*law, *[0.0] * 12])
    padded = ScriptedDrafter([[0, 0], [1, 15], [5, 1], [0, 2, 5], [3]], name="padded")
    beyond = ScriptedDrafter([[0, 16], [40, 1]], name="beyond")
    llm = LLM(model, draft=[padded, beyond])

    def sample(attempt: int) -> list[int]:
        count = 64
        params = [
            SamplingParams(temperature=1.0, max_tokens=40, seed=attempt * count + seed)
            for seed in range(count)
        ]
        outputs = llm.generate([[0, 1]] * count, params)
        return [token for output in outputs for token in output.token_ids]

    assert_law(sample, law, label="padded vocabulary")


def with_permuted_ids(tokenizer: Any) -> Any:
    """The same strings under other ids: the byte tokens rotated by one."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    core = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = core["model"]["vocab"]
    low, high = 4, 260
    core["model"]["vocab"] = {
        token: (index - low + 1) % (high - low) + low if low <= index < high else index
        for token, index in vocabulary.items()
    }
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(core)))


def named(tokenizer: Any, name: str) -> Any:
    tokenizer.name_or_path = name
    return tokenizer


class OtherDrafter(BoldDrafter):
    """A drafter that says which tokenizer's ids it speaks."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tiny_llama(vocab_size=512), [], name="other")
        self.tokenizer = tokenizer


def test_k3_permuted_ids() -> None:
    draft = named(with_permuted_ids(tiny_tokenizer(NUM_TOKENS)), "some/draft")
    with pytest.raises(ModelError) as caught:
        LLM(
            tiny_llama(vocab_size=TARGET_SIZE),
            named(tiny_tokenizer(NUM_TOKENS), "some/target"),
            draft=OtherDrafter(draft),
        )
    assert str(caught.value) == (
        "the draft other has another tokenizer (some/draft, TokenizersBackend, 500 tokens) than "
        "the target (some/target, TokenizersBackend, 500 tokens): id 4 is 'Ń' in the draft's and "
        "'!' in the target's; choose a draft made for this target"
    )


def test_k3_fewer_ids() -> None:
    with pytest.raises(ModelError) as caught:
        LLM(
            tiny_llama(vocab_size=TARGET_SIZE),
            tiny_tokenizer(NUM_TOKENS),
            draft=["ngram", OtherDrafter(tiny_tokenizer(NUM_TOKENS - 40))],
        )
    message = str(caught.value)
    assert "460 tokens" in message
    assert "500 tokens" in message
    assert "id 460 is no token in the draft's and " in message


def test_k3_same_tokenizer_is_taken() -> None:
    """Also with fillers up to a round size, and where one side says nothing."""
    model = tiny_llama(vocab_size=TARGET_SIZE)
    padded = tiny_tokenizer(NUM_TOKENS)
    padded.add_tokens([f"[PAD{index}]" for index in range(NUM_TOKENS, 512)])
    assert len(padded) == 512
    for draft in (tiny_tokenizer(NUM_TOKENS), padded, None):
        LLM(model, tiny_tokenizer(NUM_TOKENS), draft=OtherDrafter(draft))
    LLM(model, draft=OtherDrafter(tiny_tokenizer(NUM_TOKENS)))


def test_k3_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.cli.main import app

    draft = with_permuted_ids(tiny_tokenizer(512))
    monkeypatch.setitem(registry._DRAFTERS, "other", (lambda: OtherDrafter(draft), "for a test"))
    tiny_llama().save_pretrained(tmp_path)
    tiny_tokenizer(512).save_pretrained(tmp_path)
    for command in (
        ["generate", str(tmp_path), "-p", "hi"],
        ["serve", str(tmp_path), "--port", "0"],
    ):
        result = CliRunner().invoke(app, [*command, "--draft", "other"])
        assert result.exit_code == 1, result.output
        assert "the draft other has another tokenizer (" in result.output
        assert "Traceback" not in result.output


def test_error_is_one_line() -> None:
    model, tokenizer = tiny_llama(), tiny_tokenizer(512)
    other = OtherDrafter(with_permuted_ids(tokenizer))
    assert "another tokenizer" in tiny.error_line(LLM, model, tokenizer, draft=other)
