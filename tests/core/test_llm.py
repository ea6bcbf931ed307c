"""The offline interface: kinds of prompts, per-prompt settings, errors, model_path."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from specdec import LLM, SamplingParams, Speculation
from specdec.errors import InvalidRequestError, ModelError, SpecdecError
from specdec.testing import tiny_llama, tiny_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_llama(), tiny_tokenizer())


def test_prompts_are_text_ids_or_chats_one_or_many(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    ids = llm.tokenizer("hello")["input_ids"]
    text_out, ids_out, chat_out = llm.generate(["hello", ids, chat], GREEDY)
    assert text_out.prompt_token_ids == ids_out.prompt_token_ids == tuple(ids)
    assert text_out.token_ids == ids_out.token_ids
    templated = llm.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert list(chat_out.prompt_token_ids) == templated
    for single in ("hello", ids, chat):
        (out,) = llm.generate(single, GREEDY)
        assert len(out.token_ids) == 6
    assert llm.generate([], GREEDY) == []
    (numpy_out,) = llm.generate(list(np.array(ids)), GREEDY)
    assert numpy_out.token_ids == ids_out.token_ids
    for nonsense in ([1.5], [True], [None], [["a"]]):
        with pytest.raises(InvalidRequestError, match="prompt"):
            llm.generate(nonsense, GREEDY)


def test_settings_may_differ_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, logprobs=n) for n in (1, 2, 3)]
    outs = llm.generate(["a", "b", "c"], params, speculation=[Speculation(mode="off")] * 3)
    assert [len(out.token_ids) for out in outs] == [1, 2, 3]
    for out, count in zip(outs, (1, 2, 3), strict=True):
        assert out.logprobs is not None
        assert [len(entry.top) for entry in out.logprobs] == [count] * count
    with pytest.raises(InvalidRequestError, match=r"sampling_params: .* 2 for 3"):
        llm.generate(["a", "b", "c"], params[:2])


def test_an_unset_seed_is_drawn_and_reported(llm: LLM) -> None:
    hot = SamplingParams(temperature=1.0, max_tokens=8)
    first, second = llm.generate(["x", "x"], hot)
    assert first.seed != second.seed
    (again,) = llm.generate("x", SamplingParams(temperature=1.0, max_tokens=8, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_a_bad_prompt_leaves_no_request_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.generate([[1, 2], []], GREEDY)
    assert not llm.engine.has_work
    llm.reset_state()


def test_a_failed_request_is_an_error_and_the_rest_is_freed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(llm.engine._runner, "score", broken)
    with pytest.raises(SpecdecError, match="out of luck"):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.undo()
    assert llm.engine.counters.num_used_pages == 0
    assert len(llm.generate("a", GREEDY)[0].token_ids) == 6


def test_without_a_tokenizer_text_is_refused() -> None:
    bare = LLM(tiny_llama())
    assert bare.generate([5, 6], GREEDY)[0].text == ""
    for prompt in ("text", [{"role": "user", "content": "hi"}]):
        with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
            bare.generate(prompt, GREEDY)


def test_model_path_is_a_folder_transformers_loads(llm: LLM) -> None:
    again = AutoModelForCausalLM.from_pretrained(llm.model_path)
    assert again.config.vocab_size == llm.engine.vocab_size


def test_settings_are_checked_before_anything_is_loaded() -> None:
    for name, value in (("generation_config", "some"), ("max_model_len", 9999)):
        with pytest.raises(InvalidRequestError, match=f"^{name}"):
            LLM(tiny_llama(), **{name: value})
    for name, value in (
        ("dtype", "bf16"),
        ("device", "cuda"),
        ("draft", "nope"),
        ("attention", "x"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{name}"):
            LLM(tiny_llama(), **{name: value})
    LLM(tiny_llama(), dtype="fp32", device="cpu")
    with pytest.raises(TypeError, match="num_page"):
        LLM(tiny_llama(), num_page=3)
    with pytest.raises(ValueError, match="unknown drafter"):
        LLM(tiny_llama(), draft="nope")
    with pytest.raises(ModelError, match="no/such/folder"):
        LLM("no/such/folder")


def test_importing_specdec_loads_no_framework() -> None:
    code = "import sys, specdec; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
