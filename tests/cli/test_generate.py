"""`specdec generate`, from a folder and from a server."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from specdec import LLM
from specdec.cli.answer import read_answer
from specdec.cli.source import LocalStream
from specdec.request import FinishReason, SamplingParams, Speculation
from specdec.rpc.client import Client
from specdec.testing import tiny_tokenizer
from tests.cli.conftest import Run
from tests.rpc.running import RunningServer

PROMPT = "the time of the day"
CHAT = [{"role": "user", "content": PROMPT}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
OPTIONS = ["--temperature", "0", "-n", "12"]


@pytest.fixture(params=["local", "server"])
def source(request: pytest.FixtureRequest, tiny_folder: str, running: RunningServer) -> list[str]:
    """The arguments that choose where the answer comes from."""
    return [tiny_folder] if request.param == "local" else ["--server", running.address]


def test_text_to_stdout_and_statistics_to_stderr(run: Run, source: list[str], llm: Any) -> None:
    expected = llm.generate(CHAT, GREEDY)[0]
    result = run("generate", *source, "-p", PROMPT, *OPTIONS)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected.text + ("" if expected.text.endswith("\n") else "\n")
    summary = result.stderr.strip().splitlines()[-1]
    assert summary.startswith("12 tokens · ")
    assert "tokens/s · acceptance length " in summary
    assert summary.endswith(" ms · length")


def test_no_chat_sends_the_prompt_as_it_is(run: Run, source: list[str], llm: Any) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0]
    result = run("generate", *source, "-p", PROMPT, "--no-chat", "--json", "-q", *OPTIONS)
    assert result.exit_code == 0, result.stderr
    assert tuple(json.loads(result.stdout)["token_ids"]) == expected.token_ids


def test_json_is_one_object(run: Run, source: list[str], llm: Any) -> None:
    expected = llm.generate(CHAT, SamplingParams(temperature=0.0, max_tokens=12, logprobs=2))[0]
    more = ["--logprobs", "2", "--seed", "5", "--json", "--quiet"]
    result = run("generate", *source, "-p", PROMPT, *OPTIONS, *more)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["text"] == expected.text
    assert answer["token_ids"] == list(expected.token_ids)
    assert (answer["finish_reason"], answer["stop_reason"]) == ("length", None)
    assert answer["seed"] == 5
    assert answer["stats"]["num_output_tokens"] == 12
    assert answer["stats"]["acceptance_length"] >= 1.0
    assert answer["stats"]["tokens_per_second"] > 0
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in answer["logprobs"])


@pytest.mark.parametrize("how", [["-p", "-"], ["-"]], ids=["option", "argument"])
def test_dash_reads_stdin(run: Run, running: RunningServer, llm: Any, how: list[str]) -> None:
    expected = llm.generate(CHAT, GREEDY)[0]
    result = run("generate", "--server", running.address, *how, *OPTIONS, "--json", input=PROMPT)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["text"] == expected.text


def test_sampling_and_stop_options_arrive(run: Run, source: list[str], llm: Any) -> None:
    plain = llm.generate(CHAT, GREEDY)[0]
    stop_id = plain.token_ids[4]
    result = run(
        "generate", *source, "-p", PROMPT, *OPTIONS, "--stop-token-id", str(stop_id), "--json"
    )
    answer = json.loads(result.stdout)
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop_id)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=12)
    expected = llm.generate(CHAT, params)[0]
    sampled = ["--temperature", "0.8", "--top-p", "0.9", "--seed", "11", "-n", "12", "--json"]
    result = run("generate", *source, "-p", PROMPT, *sampled)
    assert json.loads(result.stdout)["token_ids"] == list(expected.token_ids)


def test_speculation_option_arrives(run: Run, source: list[str]) -> None:
    repeated = "the time of " * 20
    steps = {}
    for mode in ("off", "fixed"):
        result = run(
            "generate", *source, "-p", repeated, "--no-chat", "--temperature", "0", "-n", "30",
            "--speculation", mode, "--json",
        )  # fmt: skip
        steps[mode] = json.loads(result.stdout)["stats"]["num_spec_steps"]
    assert steps["off"] == 0
    assert steps["fixed"] > 0


def test_several_answers_are_numbered_and_in_order(run: Run, source: list[str], llm: Any) -> None:
    sampled = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12)
    expected = llm.generate(CHAT, sampled)[0].outputs
    options = ["--temperature", "1", "--seed", "3", "--n", "3", "-n", "12"]
    result = run("generate", *source, "-p", PROMPT, *options)
    assert result.exit_code == 0, result.stderr
    blocks = [
        f"--- answer {index + 1} of 3 ---\n{output.text}" + "\n" * (output.text[-1:] != "\n")
        for index, output in enumerate(expected)
    ]
    assert result.stdout == "\n".join(blocks)
    summaries = result.stderr.strip().splitlines()[-3:]
    assert [line.split(":")[0] for line in summaries] == ["answer 1", "answer 2", "answer 3"]
    result = run("generate", *source, "-p", PROMPT, *options, "--json", "-q")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record["seed"] for record in records] == [output.seed for output in expected]
    assert [record["token_ids"] for record in records] == [list(o.token_ids) for o in expected]


def test_prompt_logprobs_are_in_the_json(run: Run, source: list[str], llm: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1)
    expected = llm.generate(PROMPT, params)[0].prompt_logprobs
    more = ["--no-chat", "--prompt-logprobs", "1", "--json", "-q"]
    record = json.loads(run("generate", *source, "-p", PROMPT, *OPTIONS, *more).stdout)
    assert record["prompt_logprobs"][0] is None
    assert [entry["token_id"] for entry in record["prompt_logprobs"][1:]] == [
        entry.token_id for entry in expected[1:]
    ]
    assert all(len(entry["top"]) == 1 for entry in record["prompt_logprobs"][1:])


def test_the_answer_has_the_form_asked_for(run: Run, source: list[str]) -> None:
    result = run("generate", *source, "-p", PROMPT, "-q", "--choice", "to be", "--choice", "or not")
    assert result.exit_code == 0, result.stderr
    assert result.stdout in ("to be\n", "or not\n")


@pytest.mark.parametrize(
    ("options", "start"),
    [
        (["--regex", "("], "--regex: "),
        (["--json-schema", '{"type": "nonsense"}'], "--json-schema: "),
        (["--logit-bias", "100000=1"], "--logit-bias: "),
        (["--allowed-token-id", "100000"], "--allowed-token-id: "),
        (["--logprobs", "100000", "--json"], "--logprobs: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_the_engine_refuses_is_named(
    run: Run, source: list[str], options: list[str], start: str
) -> None:
    result = run("generate", *source, "-p", PROMPT, *options)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(f"error: {start}")


def test_a_prompt_that_is_too_long_is_not_sent_without_its_template(
    run: Run, source: list[str]
) -> None:
    """The plain text of this prompt would fit."""
    text = "\n" * 2995
    assert run("generate", *source, "-p", text, "-n", "1", "-q", "--no-chat").exit_code == 0
    result = run("generate", *source, "-p", text, "-n", "1", "-q")
    assert result.exit_code == 1
    assert "leave room for an answer" in result.stderr


def test_a_model_without_template_gets_the_plain_prompt(
    run: Run, tmp_path: Any, tiny_model: Any, llm: Any
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = llm.generate(PROMPT, GREEDY)[0]
    result = run("generate", str(tmp_path), "-p", PROMPT, *OPTIONS, "--json")
    assert json.loads(result.stdout)["token_ids"] == list(expected.token_ids)
    refused = run("generate", str(tmp_path), "-p", PROMPT, *OPTIONS, "--chat")
    assert refused.exit_code == 1
    assert "chat template" in refused.stderr
    with RunningServer(lambda: LLM(tiny_model, tokenizer, num_pages=250).engine) as server:
        asked = ["generate", "--server", server.address, "-p", PROMPT, *OPTIONS]
        answer = json.loads(run(*asked, "--json").stdout)
        assert answer["token_ids"] == list(expected.token_ids)
        refused = run(*asked, "--chat")
        assert refused.exit_code == 1
        assert "chat template" in refused.stderr


class Interrupting:
    """A stream during whose third delta the user presses Ctrl-C."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.seeds: dict[int, int] = {}
        self.cancel = stream.cancel

    def __iter__(self) -> Any:
        for count, delta in enumerate(self.stream):
            if count == 2:
                signal.raise_signal(signal.SIGINT)
            yield delta


def test_interrupt_keeps_what_came_so_far(llm: Any, running: RunningServer) -> None:
    long, off = (
        SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True),
        Speculation(mode="off"),
    )
    with Client(running.address) as client:
        streams = [
            LocalStream(llm, [1, 2, 3], long, off),
            client.generate([1, 2, 3], long, off),
        ]
        for stream in streams:
            answer, interrupted = read_answer(Interrupting(stream), echo=False)
            assert interrupted
            assert answer.finish_reason is FinishReason.ABORT
            assert 3 <= len(answer.token_ids) == answer.stats.num_output_tokens < 2000
            assert answer.summary().startswith(f"{len(answer.token_ids)} tokens · ")
            assert answer.summary().endswith(" · abort")
    assert not llm.engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_raises(llm: Any) -> None:
    class Twice(Interrupting):
        def __iter__(self) -> Any:
            yield next(self.stream)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    stream = LocalStream(llm, [1, 2], SamplingParams(max_tokens=50), None)
    with pytest.raises(KeyboardInterrupt):
        read_answer(Twice(stream), echo=False)
    llm.engine.abort("cli")
