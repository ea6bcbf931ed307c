"""The mask of a grammar is the set of tokens after which its text can still be completed."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import regex
from llguidance import LLParserLimits
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as CoreTokenizer
from transformers import PreTrainedTokenizerFast

from specdec.errors import InvalidRequestError
from specdec.grammar import Grammar
from specdec.sampling import grammar as under_test
from specdec.sampling.grammar import MAX_GRAMMAR_BYTES, GrammarCompiler, GrammarMatcher
from specdec.testing import tiny_tokenizer
from specdec.tokenizer import Tokenizer
from specdec_drafts.tree import TokenTree, TreeBuilder

VOCAB_SIZE = 520
"""Of the model: both tokenizers have fewer ids."""

Accepts = Callable[[bytes], tuple[bool, bool]]
"""Whether a text begins one of the language, and whether it is one."""


def byte_level() -> tuple[PreTrainedTokenizerFast, list[bytes | None], frozenset[int]]:
    """TINY's tokenizer, the bytes of its tokens (None: special) and two EOS ids."""
    tokenizer = tiny_tokenizer(512)
    # GPT-2's table: printable characters stand for themselves, the other bytes follow from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    names = tokenizer.convert_ids_to_tokens(range(512))
    told = [None if i < 4 else bytes(table[c] for c in name) for i, name in enumerate(names)]
    return tokenizer, told, frozenset({1, 3})


def byte_fallback() -> tuple[PreTrainedTokenizerFast, list[bytes | None], frozenset[int]]:
    """A tokenizer as Llama 2's: U+2581 for a space, <0xNN> for bytes without a token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("\u2581", "t"), ("t", "h"), ("r", "e"), ("re", "d"), ("\u2581", "red"), ("1", "0")]
    tokens += ["\u2581", *'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,é']
    tokens += [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    core = CoreTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    core.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>")
    told: list[bytes | None] = [None, None, None, *(bytes([byte]) for byte in range(256))]
    told += [token.replace("\u2581", " ").encode() for token in tokens[259:]]
    return tokenizer, told, frozenset({2})


class Kit:
    """A compiler, and what its tokens say by another reading than llguidance's."""

    def __init__(
        self, make: Callable[[], tuple[PreTrainedTokenizerFast, list[bytes | None], frozenset[int]]]
    ) -> None:
        self.tokenizer, self.told, self.eos = make()
        self.compiler = GrammarCompiler(Tokenizer(self.tokenizer), VOCAB_SIZE, self.eos)

    def expected(self, text: bytes, accepts: Accepts) -> list[int]:
        """Tokens allowed after a text, by brute force."""
        told = enumerate(self.told)
        allowed = [i for i, piece in told if piece is not None and accepts(text + piece)[0]]
        return sorted([*allowed, *(self.eos if accepts(text)[1] else ())])


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=lambda make: make.__name__)
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(request.param)


@pytest.fixture(scope="module")
def tiny_kit() -> Kit:
    return Kit(byte_level)


def allowed_by(matcher: GrammarMatcher) -> list[int]:
    row = np.zeros(VOCAB_SIZE, dtype=np.float32)
    matcher.apply(row)
    assert set(np.unique(row)) <= {0.0, -np.inf}
    return [int(token) for token in np.flatnonzero(row == 0.0)]


def one_of(texts: Sequence[str]) -> Accepts:
    """A finite language, given by its texts."""
    language = {text.encode() for text in texts}
    prefixes = {text[:end] for text in language for end in range(len(text) + 1)}
    return lambda text: (text in prefixes, text in language)


def matching(pattern: str) -> Accepts:
    """A regular language of ASCII texts."""
    compiled = regex.compile(pattern.encode())

    def accepts(text: bytes) -> tuple[bool, bool]:
        partly = compiled.fullmatch(text, partial=True)
        return partly is not None, compiled.fullmatch(text) is not None

    return accepts


def spaced(*parts: str | Sequence[str]) -> list[str]:
    """All texts that choose one of each part; an optional space follows , and : outside strings."""
    choices = [[part] if isinstance(part, str) else list(part) for part in parts]
    return ["".join(text) for text in itertools.product(*choices)]


COLOURS = ("red", "re", "the red", "Ünïcode", 'say "hi"\\', "a/b\nc", "日本")
FLAG_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "é": {"enum": ["red", 10, None]}},
    "required": ["a"],
    "additionalProperties": False,
}
COMMA, COLON = (",", ", "), (":", ": ")
FLAGS = [
    *spaced('{"a"', COLON, ("true", "false"), "}"),
    *spaced('{"a"', COLON, ("true", "false"), COMMA, '"é"', COLON, ('"red"', "10", "null"), "}"),
]
LARK = """
start: greeting (" " NAME){1,2}
greeting: "hi" | "hello"
NAME: /the|[ab]{1,2}/
"""
NAMED = ["the", "a", "b", "aa", "ab", "ba", "bb"]
GREETINGS = [
    *spaced(("hi", "hello"), " ", NAMED),
    *spaced(("hi", "hello"), " ", NAMED, " ", NAMED),
]
GBNF = """
root ::= "hi" name{1,2} | "hello" name{1,2}   # llama.cpp's notation
name ::= " " ("the" | [ab] [ab]?)
"""
CASES: dict[str, tuple[Grammar, Accepts]] = {
    "choice": (Grammar(choice=COLOURS), one_of(COLOURS)),
    "schema": (Grammar(json_schema=FLAG_SCHEMA), one_of(FLAGS)),
    "lark": (Grammar(ebnf=LARK), one_of(GREETINGS)),
    "gbnf": (Grammar(ebnf=GBNF), one_of(GREETINGS)),
    "regex": (
        Grammar(regex=r"[a-z]{2,6}(, ?[0-9]+)*/(red)?"),
        matching(r"[a-z]{2,6}(, ?[0-9]+)*/(red)?"),
    ),
    "anchored": (Grammar(regex="^(10|the)+$"), matching("(10|the)+")),
    "string": (
        Grammar(json_schema={"type": "string", "pattern": "^[a-c ]*$", "maxLength": 4}),
        matching('"[a-c ]{0,4}"'),
    ),
    "integer": (
        Grammar(json_schema={"type": "integer", "minimum": -12, "maximum": 130}),
        one_of([str(number) for number in range(-12, 131)] + ["-0"]),
    ),
}


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


def test_no_text_of_a_json_schema_needs_more_whitespace(kit: Kit) -> None:
    """Where a model may write any whitespace, it may write it for ever."""
    schema = {"type": "array", "items": {"type": "object"}, "maxItems": 1}
    for grammar in (Grammar(json_schema=schema), Grammar(json_object=True)):
        matcher = kit.compiler.compile(grammar)
        for token in kit.tokenizer.encode("[{" if grammar.json_schema else "{"):
            spaces = [t for t in allowed_by(matcher) if (kit.told[t] or b"x").isspace()]
            assert not spaces
            if kit.told[token] not in (None, b" "):
                matcher.append(token)


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


def tree_of(paths: Sequence[Sequence[int]], root: int = 7) -> TokenTree:
    builder = TreeBuilder(root)
    for path in paths:
        node = 0
        for token in path:
            node = builder.add(node, token, 0.5)
    return builder.build()


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
    (Grammar(regex=r"[^\s\S]"), "grammar.regex"),
    (Grammar(regex="a" * (MAX_GRAMMAR_BYTES + 1)), "grammar.regex"),
    (Grammar(choice=[f"number {index}" for index in range(10_000)]), "grammar.choice"),
    (Grammar(ebnf="start: nowhere"), "grammar.ebnf"),
    (Grammar(ebnf='begin: "a"'), "grammar.ebnf"),
    (Grammar(ebnf='root ::= "a" nowhere'), "grammar.ebnf"),
    (Grammar(ebnf='root ::= "a'), "grammar.ebnf"),
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
