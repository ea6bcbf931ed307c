"""Log-probabilities of prompts equal transformers', however the prompt is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdec import LLM, SamplingParams
from specdec.output import RequestOutput
from specdec.testing import page_check, tiny_llama

PROMPTS = [[(11 * i + 5 * j * j) % 512 for j in range(n)] for i, n in enumerate((1, 2, 16, 33, 50))]


@pytest.fixture(scope="module")
def tiny() -> PreTrainedModel:
    return tiny_llama()


def check(model: PreTrainedModel, output: RequestOutput, num_top: int) -> None:
    prompt = output.prompt_token_ids
    entries = output.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for row, token_id, entry in zip(rows, prompt[1:], entries[1:], strict=False):
        assert entry is not None
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token_id]).sum())
        values, ids = row.topk(num_top)
        assert list(entry.top) == ids.tolist()
        assert list(entry.top.values()) == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "config", [{}, {"max_batch_tokens": 16}, {"num_pages": 8, "max_model_len": 100}]
)
@pytest.mark.parametrize("num_top", [0, 3])
def test_equal_to_transformers(num_top: int, config: dict[str, Any], tiny: PreTrainedModel) -> None:
    llm = LLM(tiny, **{"num_pages": 200, **config})
    params = SamplingParams(prompt_logprobs=num_top, max_tokens=30, ignore_eos=True, seed=1)
    for _ in range(2):  # the second time, the prompts are cached, but their logits are not
        for output in llm.generate(PROMPTS, params):
            check(tiny, output, num_top)
            assert output.logprobs is None
    assert page_check(llm.engine) == 0


def test_they_change_nothing_and_come_once_for_all_answers(tiny: PreTrainedModel) -> None:
    llm = LLM(tiny, num_pages=200)
    params = SamplingParams(max_tokens=12, seed=4, n=2)
    plain = llm.generate(PROMPTS, params)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, seed=4, n=2, prompt_logprobs=1))
    for output, other in zip(outputs, plain, strict=True):
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in other.outputs]
        assert output.siblings[0].prompt_logprobs is None
        check(tiny, output, 1)
    llm.engine.add_request("a", PROMPTS[-1], params=SamplingParams(prompt_logprobs=0, max_tokens=5))
    deltas = []
    while llm.engine.has_work:
        deltas += llm.engine.step()
    assert [delta.prompt_logprobs is not None for delta in deltas].count(True) == 1
    assert deltas[0].prompt_logprobs is not None


def test_a_cached_prompt_is_still_used_without_them(tiny: PreTrainedModel) -> None:
    llm = LLM(tiny, num_pages=200)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    assert llm.generate(PROMPTS[-1], params)[0].stats.num_cached_tokens == 0
    assert llm.generate(PROMPTS[-1], params)[0].stats.num_cached_tokens == 0
    cached = llm.generate(PROMPTS[-1], SamplingParams(max_tokens=2))[0].stats.num_cached_tokens
    assert cached == 48
