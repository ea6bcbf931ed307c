"""Settings out of range are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specdec import SamplingParams, Speculation
from specdec.config import EngineConfig
from specdec.errors import InvalidRequestError
from specdec.grammar import Grammar

BAD_PARAMS: list[tuple[str, Any]] = [
    ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", "hot"), ("temperature", True), ("top_k", -2), ("top_k", 1.5),
    ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 2),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1), ("presence_penalty", 3),
    ("frequency_penalty", -2.5), ("seed", -1), ("seed", 2**64), ("seed", 1.0), ("stop", [""]),
    ("stop", [3]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("ignore_eos", 1),
    ("max_tokens", 0), ("max_tokens", 2.0), ("logprobs", -1), ("prompt_logprobs", -1),
    ("prompt_logprobs", True), ("logit_bias", {3: 101}), ("logit_bias", {3: math.nan}),
    ("logit_bias", {-1: 1}), ("logit_bias", {"3": 1}), ("logit_bias", [3]),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", 3),
    ("allowed_token_ids", "abc"), ("bad_words", "word"), ("bad_words", [""]), ("bad_words", [[]]),
    ("bad_words", [[-1]]), ("bad_words", [3]), ("min_tokens", -1), ("min_tokens", None),
    ("n", 0), ("n", 129), ("n", 1.5), ("grammar", "[a-z]+"), ("logits_processors", [3]),
    ("logits_processors", print), ("include_stop_str_in_output", "yes"),
    ("skip_special_tokens", None), ("cache_salt", ""), ("cache_salt", 7), ("stop", 3),
    ("presence_penalty", None), ("temperature", -0.001), ("top_k", True),
    ("temperature", 10**400), ("logit_bias", {1: 10**400}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_bad_sampling_params_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}: ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("temperature", 101, "[0, 100]"), ("top_p", 0, "(0, 1]"), ("n", 0, "1..128"),
     ("min_tokens", -1, "at least 0"), ("logit_bias", {3: -200}, "[-100, 100]"),
     ("repetition_penalty", 0, "(0, 100]"), ("seed", -1, f"0..{2**64 - 1}"),
     ("frequency_penalty", "a", "[-2, 2]")],
)  # fmt: skip
def test_errors_say_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert allowed in caught.value.message


def test_parameters_that_exclude_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens: must be at most max_tokens = 3"):
        SamplingParams(min_tokens=4, max_tokens=3)
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        SamplingParams(grammar=Grammar(regex="a"), ignore_eos=True)


@pytest.mark.parametrize(
    "fields",
    [{}, {"regex": "a", "choice": ["b"]}, {"regex": ""}, {"choice": []}, {"choice": [""]},
     {"choice": ""}, {"json_schema": "{"}, {"json_schema": "3"}, {"json_schema": {"a": {1}}},
     {"json_object": "yes"}, {"ebnf": 3}, {"json_object": False}],
)  # fmt: skip
def test_bad_grammars(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^grammar"):
        Grammar(**fields)


def test_grammars_say_what_they_are() -> None:
    assert Grammar(json_schema={"type": "object"}).json_schema == '{"type": "object"}'
    assert Grammar(json_schema='{"type":"object"}').kind == "json_schema"
    assert Grammar(choice="yes").choice == ("yes",)
    kinds = [Grammar(json_object=True), Grammar(regex="a"), Grammar(ebnf="start: /a/")]
    assert [grammar.kind for grammar in kinds] == ["json_object", "regex", "ebnf"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("mode", "on"), ("max_nodes", -1), ("max_nodes", 256), ("max_depth", 1.5),
     ("acceptance", "typical"), ("drafts", [""])],
)  # fmt: skip
def test_bad_speculation_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^speculation\.{name}: "):
        Speculation(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("page_size", 3), ("page_size", 256), ("num_pages", 0), ("max_num_seqs", 0),
     ("max_batch_tokens", 2), ("logprobs_mode", "raw"), ("max_model_len", -5)],
)  # fmt: skip
def test_bad_engine_settings_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}: "):
        EngineConfig(**{name: value})


def test_unset_fields_take_defaults_and_set_ones_win() -> None:
    defaults = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 7}
    resolved = SamplingParams(top_p=1.0).resolved(defaults, seed=5)
    assert (resolved.temperature, resolved.top_p, resolved.max_tokens) == (0.2, 1.0, 7)
    assert (resolved.seed, resolved.top_k, resolved.repetition_penalty) == (5, 0, 1.0)
    assert SamplingParams(seed=3, temperature=0).resolved(defaults, seed=5).seed == 3


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)  # type: ignore[call-arg]
