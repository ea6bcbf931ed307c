"""Answers under a grammar: they obey it, end once, and are what the law says without a draft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import regex
from jsonschema import Draft202012Validator
from transformers import PreTrainedModel

from specdec import LLM, FinishReason, SamplingParams, Speculation
from specdec.errors import InvalidRequestError
from specdec.grammar import Grammar
from specdec.output import RequestOutput
from specdec.testing import (
    OracleDrafter,
    ScriptedDrafter,
    draft_of_kind,
    page_check,
    random_prompts,
    tiny_llama,
    tiny_tokenizer,
    with_eos,
)
from tests.exactness.schemas import random_schema

OFF = Speculation(mode="off")
FIXED = Speculation(mode="fixed", max_nodes=31, max_depth=8)
NUM_SCHEMAS = 200
EOS = {1, 3}
VOCAB_SIZE = 520
"""Eight rows more than the tokenizer has ids."""

Answers = dict[Any, Sequence[int]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = tiny_llama(vocab_size=VOCAB_SIZE, max_positions=2048)
    return with_eos(model, sorted(EOS))


def make(model: PreTrainedModel, draft: Any, **fields: Any) -> LLM:
    return LLM(
        model, tiny_tokenizer(512), draft=draft, **{"num_pages": 1024, "page_size": 16, **fields}
    )


def by_seed(outputs: Sequence[RequestOutput]) -> Answers:
    return {(o.seed, o.prompt_token_ids): o.token_ids for o in outputs}


def ids(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def assert_whole(output: RequestOutput, schema: Any) -> None:
    """The answer ended by itself, once, and is JSON that obeys the schema."""
    assert output.finish_reason is FinishReason.STOP
    assert [token in EOS for token in output.token_ids].index(True) == len(output.token_ids) - 1
    Draft202012Validator(schema).validate(json.loads(output.text))


# ---- 200 random schemas ----


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> tuple[list[list[int]], list[SamplingParams], list[Any]]:
    """Prompts, parameters and plain outputs of all schemas at temperature 2."""
    prompts = random_prompts(NUM_SCHEMAS, longest=12)
    params = [
        SamplingParams(
            temperature=2.0, seed=seed, max_tokens=1900,
            grammar=Grammar(json_schema=random_schema(seed)),
        )
        for seed in range(NUM_SCHEMAS)
    ]  # fmt: skip
    return prompts, params, make(model, "none").generate(prompts, params, speculation=OFF)


def test_every_schema_is_obeyed(plain: Any) -> None:
    _, params, outputs = plain
    for param, output in zip(params, outputs, strict=True):
        assert_whole(output, json.loads(param.grammar.json_schema))
    assert len({output.text for output in outputs}) > NUM_SCHEMAS / 2
    assert max(len(output.token_ids) for output in outputs) > 50


@pytest.mark.parametrize("kind", ["self-tree", "noisy-tree", "random-tree"])
def test_trees_change_no_answer_under_a_schema(
    kind: str, model: PreTrainedModel, plain: Any
) -> None:
    prompts, params, expected = plain
    llm = make(model, draft_of_kind(kind, model, by_seed(expected)))
    outputs = llm.generate(prompts, params, speculation=FIXED)
    assert ids(outputs) == ids(expected)
    assert [o.text for o in outputs] == [o.text for o in expected]
    drafted = sum(output.stats.num_draft_tokens for output in outputs)
    accepted = sum(output.stats.num_accepted_draft_tokens for output in outputs)
    passes = sum(output.stats.num_spec_steps for output in outputs)
    if kind == "self-tree":
        assert accepted > 1.5 * passes
    elif kind == "noisy-tree":
        assert 0.3 < accepted / passes < 2.0
    else:
        assert accepted < drafted
    assert page_check(llm.engine) == 0


# ---- one string field: the end, with drafts that go on past it ----

NAME = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_matcher_is_never_asked_past_the_end(
    temperature: float, model: PreTrainedModel
) -> None:
    """Drafts propose text after the end token; elsewhere that lost 1-5 % of the requests."""
    prompts = random_prompts(50, longest=20, seed=1)
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=200, grammar=Grammar(json_schema=NAME)
        )
        for seed in range(50)
    ]
    expected = make(model, "none").generate(prompts, params, speculation=OFF)
    for output in expected:
        assert_whole(output, NAME)
    # The answer, its end, a second end, and a second answer.
    past = {key: [*answer, *EOS, *answer] for key, answer in by_seed(expected).items()}
    drafts = [OracleDrafter(past, VOCAB_SIZE, (3, 2, 2, 1, 1)), draft_of_kind("random-tree", model)]
    for draft in drafts:
        outputs = make(model, draft).generate(prompts, params, speculation=FIXED)
        assert ids(outputs) == ids(expected)
    for kind in ("self-chain", "self-tree"):
        if temperature == 0.0:
            outputs = make(model, draft_of_kind(kind, model)).generate(
                prompts[:5], params[:5], speculation=FIXED
            )
            assert ids(outputs) == ids(expected[:5])


def test_a_stop_string_or_a_limit_may_end_it_earlier(model: PreTrainedModel) -> None:
    llm = make(model, "ngram")
    grammar = Grammar(json_schema=NAME)
    stopped, cut = llm.generate(
        [[5, 6]] * 2,
        [
            SamplingParams(temperature=0, max_tokens=200, grammar=grammar, stop=":"),
            SamplingParams(temperature=0, max_tokens=3, grammar=grammar),
        ],
    )
    assert (stopped.text, stopped.finish_reason) == ('{"name"', FinishReason.STOP)
    assert cut.finish_reason is FinishReason.LENGTH


# ---- greedy, several answers, few pages ----

GRAMMARS = {
    "regex": Grammar(regex=r"(red|green|blue)( [0-9]{1,3}){2,4}"),
    "choice": Grammar(choice=["positive", "negative", "neutral", "日本"]),
    "lark": Grammar(ebnf='start: "(" (WORD | start) ")"\nWORD: /[a-z]{1,5}/'),
    "gbnf": Grammar(ebnf='root ::= "-"? [1-9] [0-9]{0,3} ("." [0-9]{1,3})?'),
    "schema": Grammar(json_schema=NAME),
}
FORMS = {
    "regex": r"(red|green|blue)( [0-9]{1,3}){2,4}",
    "choice": "positive|negative|neutral|日本",
    "lark": r"\(+[a-z]{1,5}\)+",
    "gbnf": r"-?[1-9][0-9]{0,3}(\.[0-9]{1,3})?",
    "schema": r'\{"name": ?".*"\}',
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("name", GRAMMARS)
def test_each_kind_of_grammar_with_each_kind_of_draft(
    name: str, temperature: float, model: PreTrainedModel
) -> None:
    prompts = random_prompts(6, longest=20, seed=2)
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=150, grammar=GRAMMARS[name],
            repetition_penalty=1.2, bad_words=["7"], logprobs=1,
        )
        for seed in range(6)
    ]  # fmt: skip
    expected = make(model, "none").generate(prompts, params, speculation=OFF)
    for output in expected:
        if output.finish_reason is FinishReason.STOP:
            assert regex.fullmatch(FORMS[name], output.text), output.text
    assert any(output.finish_reason is FinishReason.STOP for output in expected)
    for kind in ("ngram", "self-tree", "random-chain"):
        draft = draft_of_kind(kind, model, by_seed(expected))
        outputs = make(model, draft).generate(prompts, params, speculation=FIXED)
        assert ids(outputs) == ids(expected), kind


def test_answers_of_one_request_have_matchers_of_their_own(model: PreTrainedModel) -> None:
    params = SamplingParams(
        temperature=2.0, seed=5, n=4, max_tokens=200, grammar=Grammar(json_schema=NAME)
    )
    (plain,) = make(model, "none").generate([[9, 8, 7]], params, speculation=OFF)
    (output,) = make(model, draft_of_kind("random-tree", model)).generate(
        [[9, 8, 7]], params, speculation=FIXED
    )
    assert ids(output.outputs) == ids(plain.outputs)
    assert len({answer.text for answer in output.outputs}) == 4
    for answer in output.outputs:
        assert_whole(answer, NAME)


def test_a_preempted_answer_goes_on_where_it_was(model: PreTrainedModel) -> None:
    prompts = random_prompts(6, longest=20, seed=3)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=80, grammar=Grammar(json_schema=NAME))
        for seed in range(6)
    ]
    expected = make(model, "none").generate(prompts, params, speculation=OFF)
    draft = draft_of_kind("self-tree", model, by_seed(expected))
    llm = make(model, draft, num_pages=24, page_size=4, max_num_seqs=6, max_model_len=96)
    outputs = llm.generate(prompts, params, speculation=FIXED)
    assert sum(output.stats.num_preemptions for output in outputs) > 0
    assert ids(outputs) == ids(expected)


# ---- drafted nodes that the grammar forbids are not scored ----


def test_forbidden_drafts_are_taken_out_before_they_are_scored(model: PreTrainedModel) -> None:
    tokenizer = tiny_tokenizer(512)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    letters = tokenizer.convert_tokens_to_ids(list("abcdefgh"))
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=60, grammar=Grammar(regex="[a-z]{20,40}")
    )
    (expected,) = make(model, "none").generate([[4, 5]], params, speculation=OFF)

    def scored(paths: list[list[int]]) -> int:
        llm = make(model, ScriptedDrafter(paths))
        (output,) = llm.generate([[4, 5]], params, speculation=FIXED)
        assert output.token_ids == expected.token_ids
        return output.stats.num_draft_tokens

    assert scored([[digit, letters[0], letters[1]] for digit in digits]) == 0
    assert scored([[letter, digits[0], letter] for letter in letters]) > 0
    both = [[letters[0], letters[1]], [letters[2], digits[0], letters[3]], [digits[1], letters[0]]]
    assert scored(both) == scored([[letters[0], letters[1]], [letters[2]]])


# ---- refusals ----


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (Grammar(json_schema={"type": "strin"}), "grammar.json_schema"),
        (Grammar(regex="a("), "grammar.regex"),
        (Grammar(ebnf="start: nowhere"), "grammar.ebnf"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_a_wrong_grammar_is_refused_before_anything_runs(
    grammar: Grammar, field: str, model: PreTrainedModel
) -> None:
    llm = make(model, "none")
    good = SamplingParams(temperature=0.0, max_tokens=3)
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([[4], [5]], [good, SamplingParams(grammar=grammar, max_tokens=3)])
    assert caught.value.field == field
    assert not llm.engine.has_work
    assert llm.generate([[4]], good)[0].token_ids


def test_masks_that_leave_no_token_end_the_request_by_name(model: PreTrainedModel) -> None:
    """What the grammar asks for may be what another parameter forbids."""
    llm = make(model, "ngram")
    params = SamplingParams(
        temperature=0.0, max_tokens=20, min_tokens=10, grammar=Grammar(regex="ab")
    )
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([[4]], params)
    assert caught.value.field.startswith(("grammar", "min_tokens"))
    assert page_check(llm.engine) == 0


def test_a_model_without_eos_or_tokenizer_has_no_grammars() -> None:
    bare = tiny_llama()
    params = SamplingParams(grammar=Grammar(regex="a"), max_tokens=3)
    with pytest.raises(InvalidRequestError, match="tokenizer") as caught:
        LLM(bare, draft="none", num_pages=64).generate([[4]], params)
    assert caught.value.field == "grammar"
    tokenizer = tiny_tokenizer(512)
    tokenizer.eos_token = None
    with pytest.raises(InvalidRequestError, match="EOS") as caught:
        LLM(bare, tokenizer, draft="none", num_pages=64).generate([[4]], params)
    assert caught.value.field == "grammar"
