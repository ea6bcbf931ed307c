"""Every parameter has an option, and an option arrives as the parameter it names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from specdec.cli import generate as generate_module
from specdec.cli import options
from specdec.cli.groups import spread
from specdec.grammar import Grammar
from specdec.request import SamplingParams
from tests.cli.conftest import Run
from tests.cli.fakes import FakeSource

PYTHON_ONLY = {"logits_processors"}
ARRIVES = [
    (["--temperature", "0.5"], {"temperature": 0.5}),
    (["--top-k", "3"], {"top_k": 3}),
    (["--top-p", "0.5"], {"top_p": 0.5}),
    (["--min-p", "0.1"], {"min_p": 0.1}),
    (["--repetition-penalty", "1.5"], {"repetition_penalty": 1.5}),
    (["--presence-penalty", "-1"], {"presence_penalty": -1.0}),
    (["--frequency-penalty", "1"], {"frequency_penalty": 1.0}),
    (["--logit-bias", "5=-2.5", "--logit-bias", "6=1"], {"logit_bias": {5: -2.5, 6: 1.0}}),
    (["--allowed-token-id", "5", "--allowed-token-id", "6"], {"allowed_token_ids": [5, 6]}),
    (["--bad-word", "a b", "--bad-word", "c"], {"bad_words": ["a b", "c"]}),
    (["--min-tokens", "4"], {"min_tokens": 4}),
    (["--seed", "9"], {"seed": 9}),
    (["--n", "3"], {"n": 3}),
    (["--stop", "x", "--stop", "y"], {"stop": ["x", "y"]}),
    (["--stop-token-id", "8"], {"stop_token_ids": [8]}),
    (["--include-stop-str"], {"include_stop_str_in_output": True}),
    (["--ignore-eos"], {"ignore_eos": True}),
    (["--max-tokens", "7"], {"max_tokens": 7}),
    (["-n", "7"], {"max_tokens": 7}),
    (["--no-skip-special-tokens"], {"skip_special_tokens": False}),
    (["--skip-special-tokens"], {"skip_special_tokens": True}),
    (["--logprobs", "2", "--json"], {"logprobs": 2}),
    (["--prompt-logprobs", "0", "--json"], {"prompt_logprobs": 0}),
    (["--cache-salt", "mine"], {"cache_salt": "mine"}),
    (["--json-schema", '{"type": "null"}'], {"grammar": Grammar(json_schema={"type": "null"})}),
    (["--json-object"], {"grammar": Grammar(json_object=True)}),
    (["--regex", "a+"], {"grammar": Grammar(regex="a+")}),
    (["--choice", "a", "--choice", "b"], {"grammar": Grammar(choice=["a", "b"])}),
    (["--ebnf", 'start: "a"'], {"grammar": Grammar(ebnf='start: "a"')}),
    ([], {}),
]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    fake = FakeSource()
    monkeypatch.setattr(generate_module, "opened", fake.opened)
    return fake


def names(record: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def test_every_sampling_parameter_is_an_option() -> None:
    assert names(options.GenerateSampling) | {"grammar"} == names(SamplingParams) - PYTHON_ONLY
    assert names(options.GrammarOptions) == names(Grammar)


def test_every_sampling_parameter_is_tried_below() -> None:
    assert {name for _, values in ARRIVES for name in values} == names(SamplingParams) - PYTHON_ONLY
    kinds = {values["grammar"].kind for _, values in ARRIVES if "grammar" in values}
    assert kinds == names(Grammar)


@pytest.mark.parametrize(
    ("arguments", "values"), ARRIVES, ids=lambda value: " ".join(value) or "none"
)
def test_option_arrives(
    run: Run, source: FakeSource, arguments: list[str], values: dict[str, Any]
) -> None:
    result = run("generate", "-p", "x", *arguments)
    assert result.exit_code == 0, result.output
    assert source.asked[0][1] == SamplingParams(**values)


@pytest.mark.parametrize(
    ("flag", "kind", "text"),
    [("--json-schema", "json_schema", '{"type": "null"}'), ("--ebnf", "ebnf", 'start: "é"')],
)
def test_long_texts_come_from_a_file(
    run: Run, source: FakeSource, tmp_path: Path, flag: str, kind: str, text: str
) -> None:
    path = tmp_path / "text"
    path.write_text(text, encoding="utf-8")
    result = run("generate", "-p", "x", flag, f"@{path}")
    assert result.exit_code == 0, result.output
    assert source.asked[0][1].grammar == Grammar(**{kind: text})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--logit-bias", "5"], "--logit-bias needs ID=VALUE"),
        (["--logit-bias", "5=much"], "--logit-bias needs ID=VALUE"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "names token 5 twice"),
        (["--json-schema", "@/no/such/file"], "--json-schema cannot read /no/such/file: No such"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice exclude each other"),
        (["--logprobs", "2"], "--logprobs shows in --json only"),
        (["--prompt-logprobs", "2"], "--prompt-logprobs shows in --json only"),
        (["--n", "two"], "--n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_names_the_option(
    run: Run, source: FakeSource, arguments: list[str], words: str
) -> None:
    result = run("generate", "-p", "x", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert not source.asked


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--temperature", "-1"], "--temperature: must be a finite number in [0, 100]"),
        (["--logit-bias", "5=101"], "--logit-bias: must be a finite number in [-100, 100]"),
        (["--stop-token-id", "-1"], "--stop-token-id: must be an integer of at least 0"),
        (["--n", "0"], "--n: must be an integer in 1..128"),
        (["--min-tokens", "5", "--max-tokens", "4"], "--min-tokens: must be at most max_tokens"),
        (["--bad-word", ""], "--bad-word: must be a non-empty string"),
        (["--json-schema", "{"], "--json-schema: is not JSON"),
        (["--choice", ""], "--choice: must be a non-empty string"),
        (["--max-nodes", "1000"], "--max-nodes: must be an integer in 0..255"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_values_name_the_option(
    run: Run, source: FakeSource, arguments: list[str], start: str
) -> None:
    result = run("generate", "-p", "x", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {start}")
    assert len(result.stderr.splitlines()) == 1
    assert not source.asked


def test_no_option_of_speculation_means_the_default(run: Run, source: FakeSource) -> None:
    run("generate", "-p", "x")
    run("generate", "-p", "x", "--speculation", "fixed", "--max-nodes", "3")
    assert source.asked[0][2] is None
    speculation = source.asked[1][2]
    assert speculation is not None
    assert (speculation.mode.value, speculation.max_nodes) == ("fixed", 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("engine", [options.Engine, options.ServerEngine])
def test_engine_options_are_arguments_of_llm(engine: Any) -> None:
    import inspect

    from specdec.config import EngineConfig
    from specdec.llm import LLM

    assert names(engine) <= set(inspect.signature(LLM).parameters) | names(EngineConfig)


@pytest.mark.parametrize(
    "given", [["--draft", "none"], ["--device", "cpu:0"], ["--max-model-len", "9"]]
)
def test_engine_options_are_refused_with_a_server(run: Run, given: list[str]) -> None:
    result = run("generate", "-p", "x", "--server", "127.0.0.1:1", *given)
    assert result.exit_code == 2
    assert f"{given[0]} belongs to the server" in result.stderr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option(help="How wide.")] = 3
    names: Annotated[list[str] | None, typer.Option("--name")] = None


def test_spread_makes_options_of_fields(run: Run) -> None:
    from typer.testing import CliRunner

    seen = []

    @spread
    def command(first: str = "a", *, size: Size) -> None:
        seen.append((first, size))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["--width", "4", "--name", "x", "--name", "y"])
    assert result.exit_code == 0, result.output
    assert seen == [("a", Size(width=4, names=["x", "y"]))]
    assert "How wide." in CliRunner().invoke(app, ["--help"]).stdout


def test_json_records_of_several_answers(run: Run, source: FakeSource) -> None:
    result = run("generate", "-p", "x", "--n", "2", "--json", "-q")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(record["index"], record["text"]) for record in records] == [(0, "yes"), (1, "yes")]
