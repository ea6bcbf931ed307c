"""Nothing is lost when several tokens come at once or the reader is slow (fault D5)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from specdec.request import SamplingParams, Speculation
from specdec.rpc.client import Client

PROMPT = [9, 10, 11, 12] * 10


def test_joined_deltas_equal_the_unary_answer(client: Client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48)
    speculation = Speculation(mode="fixed", max_nodes=8)
    expected = client.complete(PROMPT, params, speculation)

    def read(index: int) -> None:
        ids: list[int] = []
        text = ""
        for delta in client.generate(PROMPT, params, speculation):
            ids.extend(delta.token_ids)
            text += delta.text
            assert delta.stats.num_output_tokens == len(ids)
            if index % 5 == 0:
                time.sleep(0.02)
        assert tuple(ids) == expected.token_ids
        assert text == expected.text

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(read, range(25)))
