"""Small grammars, tokenizers and an independent reading of both, for tests of the matcher."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import regex
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as CoreTokenizer
from transformers import PreTrainedTokenizerFast

from specdec.grammar import Grammar
from specdec.sampling.grammar import GrammarCompiler, GrammarMatcher
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
    "empty": (Grammar(regex="^$"), one_of([""])),
    "dollar": (Grammar(regex=r"^(1|\^)*\$"), matching(r"(1|\^)*\$")),
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


def tree_of(paths: Sequence[Sequence[int]], root: int = 7) -> TokenTree:
    builder = TreeBuilder(root)
    for path in paths:
        node = 0
        for token in path:
            node = builder.add(node, token, 0.5)
    return builder.build()
