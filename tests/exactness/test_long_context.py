"""Prompts of thousands of tokens: computed in chunks, exact, while other streams keep moving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec import LLM, SamplingParams, Speculation
from specdec.testing import OracleDrafter, page_check, reference_generate, tiny_llama

FIXED = Speculation(mode="fixed", max_nodes=15)


def check(model: PreTrainedModel, long: list[int], short: list[int], num_new: int) -> None:
    """The long prompt arrives beside a running stream; both say what transformers says."""
    expected = {"long": reference_generate(model, long, num_new)}
    stream_length = 400
    llm = LLM(model, draft="ngram", generation_config="none", max_num_seqs=4)
    engine = llm.engine
    stream = SamplingParams(temperature=0.0, max_tokens=stream_length, ignore_eos=True)
    engine.add_request("stream", short, stream, Speculation(mode="off"))
    for _ in range(3):
        engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=num_new)
    request = engine.add_request("long", long, params, FIXED)
    ids: dict[str, list[int]] = {"stream": [], "long": []}
    num_chunks = 0
    while "long" in engine.request_ids:
        started = bool(request.answer.token_ids)
        computed = request.num_computed
        moved = engine.step()
        for delta in moved:
            assert delta.error is None, delta.error
            ids[delta.request_id] += delta.token_ids
        if not started:
            # Every step of the prompt emits for the stream too, and computes no more than it may.
            assert any(delta.request_id == "stream" for delta in moved)
            assert request.num_computed - computed <= llm.engine.config.max_chunk_tokens
            num_chunks += 1
    assert num_chunks >= len(long) // llm.engine.config.max_chunk_tokens
    assert ids["long"] == expected["long"]
    engine.abort("stream")
    reference = reference_generate(model, short, 3 + len(ids["stream"]))
    assert ids["stream"] == reference[3:]
    assert page_check(engine) == 0


def test_three_thousand_tokens_on_tiny() -> None:
    model = tiny_llama(max_positions=4096)
    check(model, [(31 * i + i * i // 7) % 512 for i in range(3000)], [5, 6, 7], 24)


@pytest.mark.slow
@pytest.mark.smol
@pytest.mark.timeout(1800)
def test_eight_thousand_tokens_on_smol(smol_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    text = " ".join(f"Item {i} of the list costs {i * i % 97} coins." for i in range(900))
    check(model, tokenizer(text)["input_ids"][:8000], tokenizer("Once upon")["input_ids"], 16)


def test_a_draft_at_the_end_of_a_long_context() -> None:
    """Trees are scored far from the beginning, up to the last position there is."""
    model = tiny_llama(max_positions=2048)
    prompt = [(17 * i) % 512 for i in range(2000)]
    answer = reference_generate(model, prompt, 48)
    llm = LLM(model, draft=OracleDrafter({tuple(prompt): answer}, 512, (3, 2, 2)))
    output = llm.generate(prompt, SamplingParams(temperature=0.0), speculation=FIXED)[0]
    assert list(output.token_ids) == answer
    assert output.stats.acceptance_length > 2.5
