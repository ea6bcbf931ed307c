"""A grammar that cannot run is an error of the request, which names its field."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as CoreTokenizer
from transformers import PreTrainedTokenizerFast

from specdec.errors import InvalidRequestError
from specdec.grammar import Grammar
from specdec.sampling import grammar as under_test
from specdec.sampling.grammar import MAX_GRAMMAR_BYTES, GrammarCompiler
from specdec.tokenizer import Tokenizer
from tests.sampling.grammars import VOCAB_SIZE, Kit, allowed_by, byte_level, tree_of


@pytest.fixture(scope="module")
def tiny_kit() -> Kit:
    return Kit(byte_level)


WRONG = [
    (Grammar(json_schema={"type": "strin"}), "grammar.json_schema"),
    (Grammar(json_schema={"not": {"type": "object"}}), "grammar.json_schema"),
    (Grammar(json_schema={"type": "string", "pattern": "(?=a)b"}), "grammar.json_schema"),
    (Grammar(json_schema={"$ref": "#/nowhere"}), "grammar.json_schema"),
    (Grammar(json_schema={"enum": []}), "grammar.json_schema"),
    (Grammar(json_schema={"x-guidance": 1}), "grammar.json_schema"),
    (Grammar(json_schema={"type": "integer", "minimum": 3, "maximum": 2}), "grammar.json_schema"),
    (Grammar(regex="a(b"), "grammar.regex"),
    (Grammar(regex="(?=a)b"), "grammar.regex"),
    (Grammar(regex="\ud800"), "grammar.regex"),
    (Grammar(choice=["a", "\udfff"]), "grammar.choice"),
    (Grammar(json_schema={"const": "\ud800"}), "grammar.json_schema"),
    (Grammar(regex=r"[^\s\S]"), "grammar.regex"),
    (Grammar(regex="a" * (MAX_GRAMMAR_BYTES + 1)), "grammar.regex"),
    (Grammar(choice=[f"number {index}" for index in range(10_000)]), "grammar.choice"),
    (Grammar(ebnf="start: nowhere"), "grammar.ebnf"),
    (Grammar(ebnf='begin: "a"'), "grammar.ebnf"),
    (Grammar(ebnf='root ::= "a" nowhere'), "grammar.ebnf"),
    (Grammar(ebnf='root ::= "a'), "grammar.ebnf"),
    (Grammar(ebnf=r'root ::= "\UFFFFFFFF"'), "grammar.ebnf"),
    (Grammar(ebnf="nothing at all"), "grammar.ebnf"),
    (Grammar(ebnf="start: word\nword[max_tokens=3]: /[a-z]+/"), "grammar.ebnf"),
    (Grammar(ebnf="start: word\nword[lazy, temperature=0.5]: /[a-z]+/"), "grammar.ebnf"),
    (Grammar(ebnf='start: word "!"\nword[stop="!"]: /[a-z!]+/'), "grammar.ebnf"),
]


@pytest.mark.parametrize(("grammar", "field"), WRONG, ids=lambda value: str(value)[:80])
def test_a_grammar_that_cannot_run_is_refused_by_name(
    grammar: Grammar, field: str, tiny_kit: Kit, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tiny_kit.compiler.compile(grammar)
    assert caught.value.field == field
    assert "\n" not in caught.value.message
    assert 8 < len(caught.value.message) < 400
    # llguidance's "line(column)" counts in a text that the caller of these has not seen.
    assert field == "grammar.ebnf" or not re.search(r"\d\(\d+\)", caught.value.message)
    assert capfd.readouterr() == ("", "")


def test_a_limit_of_the_matching_is_an_error_by_name(
    tiny_kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(**limits: int) -> Callable[..., LLParserLimits]:
        return lambda **others: LLParserLimits(**limits, **others)

    monkeypatch.setattr(under_test, "LLParserLimits", limited(initial_lexer_fuel=5))
    with pytest.raises(InvalidRequestError, match="too big") as caught:
        tiny_kit.compiler.compile(Grammar(regex="(foo[12]23|bar)"))
    assert caught.value.field == "grammar.regex"

    # An ambiguous grammar, whose parse grows with every token.
    monkeypatch.setattr(under_test, "LLParserLimits", limited(max_items_in_row=40))
    matcher = tiny_kit.compiler.compile(Grammar(ebnf='start: e\ne: e e e | e e | "x"'))
    x = tiny_kit.told.index(b"x")

    def go_on() -> None:
        for _ in range(200):
            tree = tree_of([[x, x, x], [x, x, 1]])
            assert matcher.prune(tree).num_drafted >= 1
            matcher.apply(np.zeros(VOCAB_SIZE, dtype=np.float32))
            matcher.append(x)

    with pytest.raises(InvalidRequestError) as caught:
        go_on()
    assert caught.value.field == "grammar.ebnf"
    assert "\n" not in caught.value.message


def test_rules_nested_by_the_thousand_do_not_end_the_process(tiny_kit: Kit) -> None:
    """llguidance recurses into them; on a usual stack this was a segmentation fault."""
    lines = ["start: a0", *(f'a{i}: (a{i + 1} "b")' for i in range(3000)), 'a3000: "a"']
    matcher = tiny_kit.compiler.compile(Grammar(ebnf="\n".join(lines)))
    assert allowed_by(matcher) == [tiny_kit.told.index(b"a")]
    nested = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(2000)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": {**nested, "a2000": {"type": "null"}}}
    matcher = tiny_kit.compiler.compile(Grammar(json_schema=schema))
    assert {tiny_kit.told[token] for token in allowed_by(matcher)} == {b"["}


def test_a_model_without_eos_is_refused(tiny_kit: Kit) -> None:
    for ids in (frozenset(), frozenset({VOCAB_SIZE + 3})):
        with pytest.raises(InvalidRequestError, match="eos_token_id") as caught:
            GrammarCompiler(Tokenizer(tiny_kit.tokenizer), VOCAB_SIZE, ids)
        assert caught.value.field == "grammar"


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused() -> None:
    core = CoreTokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    with pytest.raises(InvalidRequestError, match="tokenizer") as caught:
        GrammarCompiler(Tokenizer(words), 3, frozenset({1}))
    assert caught.value.field == "grammar"


def test_a_vocabulary_that_cannot_go_on_is_told_by_name() -> None:
    alphabet = {"</s>": 0, "a": 1, "b": 2}
    core = CoreTokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>"))
    compiler = GrammarCompiler(tokenizer, 3, frozenset({0}))
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(Grammar(choice=["z"]))
    assert caught.value.field == "grammar.choice"
    matcher = compiler.compile(Grammar(choice=["az"]))
    matcher.append(1)
    with pytest.raises(InvalidRequestError, match="no token") as caught:
        matcher.apply(np.zeros(3, dtype=np.float32))
    assert caught.value.field == "grammar.choice"


def test_a_vocabulary_smaller_than_the_tokenizer_has_no_ids_beyond_it(tiny_kit: Kit) -> None:
    compiler = GrammarCompiler(Tokenizer(tiny_kit.tokenizer), 300, frozenset({1}))
    row = np.zeros(300, dtype=np.float32)
    compiler.compile(Grammar(regex="(the|t)h?")).apply(row)
    allowed = [tiny_kit.told[token] for token in np.flatnonzero(row == 0.0)]
    assert allowed == [b"t"]
