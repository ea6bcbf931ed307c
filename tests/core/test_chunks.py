"""Chunks of prompts beside running streams: small, smaller with the context, shared by prompts."""

from __future__ import annotations

from specdec import LLM, SamplingParams
from specdec.testing import tiny_llama
from tests.core.test_engine import drain, engine, prompt


def test_chunks_beside_a_stream_are_small() -> None:
    eng = engine(max_batch_tokens=256, max_chunk_tokens=64, num_pages=200)
    chunks: list[int] = []

    def step() -> None:
        before = {r.request_id: r.num_computed for r in eng._scheduler.running}
        eng.step()
        for r in eng._scheduler.running:
            if r.request_id.startswith("long"):
                chunks.append(r.num_computed - before.get(r.request_id, 0))

    eng.add_request("long alone", prompt(200), SamplingParams(max_tokens=1))
    step()
    assert not eng.has_work  # one chunk did it
    eng.add_request("stream", prompt(10, 1), SamplingParams(max_tokens=40, ignore_eos=True))
    step()
    eng.add_request("long", prompt(240, 2), SamplingParams(max_tokens=2))
    eng.add_request("long too", prompt(240, 3), SamplingParams(max_tokens=2))
    chunks.clear()
    for _ in range(4):
        step()
    # A row costs 1 + context / 2048. The end of the first leaves a little for the next, which gets
    # the 16 rows that any prompt gets.
    assert chunks == [64, 64, 64, 48, 16]


def test_chunks_shrink_with_the_context() -> None:
    model = tiny_llama(max_positions=4096)
    eng = LLM(model, draft="none", max_chunk_tokens=64, prefix_cache=False).engine
    eng.add_request("stream", prompt(10), SamplingParams(max_tokens=400, ignore_eos=True))
    eng.step()
    request = eng.add_request("long", prompt(3500), SamplingParams(max_tokens=1))
    at: dict[int, int] = {}
    while not request.answer.token_ids:
        before = request.num_computed
        eng.step()
        at[before] = request.num_computed - before
    sizes = list(at.values())[:-1]
    assert sizes == sorted(sizes, reverse=True)
    assert {rows for start, rows in at.items() if 2000 < start < 2100} == {32}
    assert set(sizes) == {64, 48, 32, 16}
    drain(eng)
    eng.check_integrity()


def test_many_short_prompts_beside_a_stream_share_the_chunk() -> None:
    eng = engine(max_batch_tokens=256, max_chunk_tokens=64, max_num_seqs=16, num_pages=200)
    eng.add_request("stream", prompt(10, 1), SamplingParams(max_tokens=40, ignore_eos=True))
    eng.step()
    for index in range(8):
        eng.add_request(f"short {index}", prompt(20, index), SamplingParams(max_tokens=20))
    eng.step()
    assert eng.counters.num_running == 1 + 4  # 20 + 20 + 20, and 16 of the fourth
    drain(eng)
