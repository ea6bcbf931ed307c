"""The mask of a grammar is the set of tokens after which its text can still be completed."""

from __future__ import annotations

import json
import random

import pytest

from specdec.grammar import Grammar
from specdec.sampling.grammar import GrammarCompiler, GrammarMatcher
from specdec.tokenizer import Tokenizer
from specdec_drafts.tree import TokenTree, TreeBuilder
from tests.sampling.grammars import (
    CASES,
    VOCAB_SIZE,
    Kit,
    allowed_by,
    byte_fallback,
    byte_level,
    one_of,
    tree_of,
)


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=lambda make: make.__name__)
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(request.param)


@pytest.fixture(scope="module")
def tiny_kit() -> Kit:
    return Kit(byte_level)


@pytest.mark.parametrize("name", CASES)
def test_mask_is_what_brute_force_finds(name: str, kit: Kit) -> None:
    grammar, accepts = CASES[name]
    for seed in range(6):
        rng = random.Random(seed)
        matcher, text = kit.compiler.compile(grammar), b""
        for _ in range(25):
            expected = kit.expected(text, accepts)
            assert allowed_by(matcher) == expected, text
            # Texts that may end go on as well.
            token = rng.choice([t for t in expected if t not in kit.eos] or expected)
            matcher.append(token)
            if token in kit.eos:
                break
            text += kit.told[token] or b""


def test_json_has_a_space_at_most_and_only_after_a_comma_or_a_colon(kit: Kit) -> None:
    """Where a model may write any whitespace, it may write it for ever."""
    matcher = kit.compiler.compile(Grammar(json_object=True))
    text = '{"a": [1, {}]}'
    for end in range(len(text) + 1):
        if end:
            matcher.append(kit.told.index(text[end - 1].encode()))
        spaces = {kit.told[t] for t in allowed_by(matcher) if (kit.told[t] or b"x").isspace()}
        in_string = text[:end].count('"') % 2 == 1
        assert spaces == ({b" "} if in_string or text[:end].endswith((",", ":")) else set()), end


def test_a_schema_may_choose_its_own_whitespace(tiny_kit: Kit) -> None:
    schema = {"type": "array", "maxItems": 0, "x-guidance": {"whitespace_pattern": "\n {1,2}"}}
    texts = ["[]", "[\n ]", "[\n  ]"]
    matcher = tiny_kit.compiler.compile(Grammar(json_schema=schema))
    for token in (tiny_kit.told.index(b"["), tiny_kit.told.index(b"\n")):
        matcher.append(token)
    assert allowed_by(matcher) == tiny_kit.expected(b"[\n", one_of(texts))


def test_a_json_object_may_hold_anything(tiny_kit: Kit) -> None:
    matcher = tiny_kit.compiler.compile(Grammar(json_object=True))
    value = {"a": [1.5, None, {"b c": "é\n\x01"}], "": True}
    text = json.dumps(value, ensure_ascii=False)
    for token in tiny_kit.tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed_by(matcher)
        matcher.append(token)
    assert allowed_by(matcher) == sorted(tiny_kit.eos)


JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
# What a string may hold.
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def test_gbnf_as_people_write_it(tiny_kit: Kit) -> None:
    value = {"a-b/c": [1.5, None, {"\\": 'q"é'}], "": True, "n": -3e5, "[x]": "\x01"}
    for text in (json.dumps(value, indent=2), json.dumps(value, ensure_ascii=False)):
        matcher = tiny_kit.compiler.compile(Grammar(ebnf=JSON_GBNF))
        for token in tiny_kit.tokenizer.encode(text, add_special_tokens=False):
            assert token in allowed_by(matcher)
            matcher.append(token)
        assert tiny_kit.eos <= set(allowed_by(matcher))
    escaped = r'root ::= "\xe9\u263a" [\u00e0-\U000000ff] "\\u0041" [\u0041]'
    matcher = tiny_kit.compiler.compile(Grammar(ebnf=escaped))
    for token in tiny_kit.tokenizer.encode("é☺ü\\u0041A", add_special_tokens=False):
        assert token in allowed_by(matcher)
        matcher.append(token)
    assert allowed_by(matcher) == sorted(tiny_kit.eos)
    matcher = tiny_kit.compiler.compile(Grammar(ebnf=JSON_GBNF))
    matcher.append(tiny_kit.told.index(b"{"))
    allowed = {tiny_kit.told[token] for token in allowed_by(matcher)}
    assert allowed == {b" ", b"\n", b'"', b"}"}


def test_every_eos_ends_the_text_and_ends_it_for_good(tiny_kit: Kit) -> None:
    for end in tiny_kit.eos:
        matcher = tiny_kit.compiler.compile(Grammar(regex="a*"))
        assert tiny_kit.eos < set(allowed_by(matcher))
        matcher.append(end)
        for token in (end, tiny_kit.told.index(b"b"), end):
            assert allowed_by(matcher) == sorted(tiny_kit.eos)
            matcher.append(token)
        tree = tree_of([[tiny_kit.told.index(b"a")], [end]])
        assert matcher.prune(tree).num_drafted == 0


def test_an_eos_that_is_an_ordinary_token_is_the_end_and_not_its_text(tiny_kit: Kit) -> None:
    letter = tiny_kit.told.index(b"a")
    compiler = GrammarCompiler(Tokenizer(tiny_kit.tokenizer), VOCAB_SIZE, frozenset({letter, 999}))
    matcher = compiler.compile(Grammar(choice=["ab", "b"]))
    assert letter not in allowed_by(matcher)
    matcher.append(tiny_kit.told.index(b"b"))
    assert allowed_by(matcher) == [letter]


def test_forks_go_their_own_ways(tiny_kit: Kit) -> None:
    a, b = tiny_kit.told.index(b"a"), tiny_kit.told.index(b"b")
    matcher = tiny_kit.compiler.compile(Grammar(choice=["aab", "aba"]))
    matcher.append(a)
    twin = matcher.fork()
    twin.append(b)
    assert set(allowed_by(twin)) == {a}
    assert {a, b} <= set(allowed_by(matcher))
    matcher.append(a)
    assert set(allowed_by(matcher)) == {b}
    twin.append(a)
    twin.append(1)
    assert allowed_by(twin.fork()) == sorted(tiny_kit.eos)


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[tree.parents[node]], tree.token_ids[node]))
    return set(paths[1:])


def allowed_paths(matcher: GrammarMatcher, tree: TokenTree) -> set[tuple[int, ...]]:
    """Paths whose every token is in the mask at its place, by the masks of forks."""
    states: list[GrammarMatcher | None] = [matcher.fork()]
    paths: list[tuple[int, ...]] = [()]
    kept = set()
    for node in range(1, tree.num_nodes):
        parent, token = tree.parents[node], tree.token_ids[node]
        before = states[parent]
        paths.append((*paths[parent], token))
        states.append(None)
        if before is None or token not in allowed_by(before):
            continue
        kept.add(paths[node])
        # Nothing follows an EOS in a text.
        if token not in matcher._eos:
            states[node] = before.fork()
            states[node].append(token)  # type: ignore[union-attr]
    return kept


@pytest.mark.parametrize("name", CASES)
def test_prune_takes_out_what_the_mask_forbids_and_nothing_else(name: str, kit: Kit) -> None:
    grammar, _ = CASES[name]
    num_dropped = 0
    for seed in range(10):
        rng = random.Random(seed)
        matcher = kit.compiler.compile(grammar)
        for _ in range(6):
            before = allowed_by(matcher)
            tree = random_tree(matcher, rng)
            pruned = matcher.prune(tree)
            pruned.check(VOCAB_SIZE)
            assert pruned.token_ids[0] == tree.token_ids[0]
            assert paths_of(pruned) == allowed_paths(matcher, tree)
            assert allowed_by(matcher) == before
            assert matcher.prune(pruned) is pruned
            num_dropped += tree.num_nodes - pruned.num_nodes
            token = rng.choice(before)
            if token in kit.eos:
                break
            matcher.append(token)
    assert num_dropped > 100


def random_tree(matcher: GrammarMatcher, rng: random.Random) -> TokenTree:
    """Random nodes, most of them allowed; some EOS in between, some ids of no token."""
    builder = TreeBuilder(7)
    states: list[GrammarMatcher | None] = [matcher.fork()]
    while len(builder) < 24:
        parent = rng.randrange(len(builder))
        state = states[parent]
        if state is None or rng.random() < 0.3:
            token = rng.randrange(VOCAB_SIZE)
        else:
            token = rng.choice(allowed_by(state))
        if builder.add(parent, token, rng.uniform(0.1, 1.0)) == len(states):
            fork = None
            if state is not None and token in allowed_by(state):
                fork = state.fork()
                fork.append(token)
            states.append(fork)
    return builder.build()


def test_a_tree_without_drafted_nodes_is_left_alone(tiny_kit: Kit) -> None:
    tree = tree_of([])
    assert tiny_kit.compiler.compile(Grammar(regex="a")).prune(tree) is tree
