"""Which tokens may come next so that the answer's text obeys the caller's Grammar.

llguidance does the matching: regular expressions by derivatives, an Earley parser over them, and a
walk of the vocabulary's trie for the mask (https://github.com/guidance-ai/llguidance).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray

from specdec.errors import InvalidRequestError
from specdec.grammar import Grammar
from specdec.tokenizer import Tokenizer
from specdec_drafts.tree import TokenTree

Floats = NDArray[np.float32]

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Whitespace of JSON, unless the schema's own "x-guidance" says otherwise: one optional space after
a comma and a colon. Where any whitespace is allowed, some models write whitespace for ever."""

MAX_GRAMMAR_BYTES = 128 * 1024

# llguidance compiles by recursion, and rules that refer to rules nest as deeply as the text is
# long: 1 to 2 KiB of stack a byte at worst. A thread that runs out of its usual 8 MiB ends the
# process.
_STACK_BYTES = 512 * 1024 * 1024

# Without it, where the grammar leaves the text no choice, only the tokenizer's own spelling of it
# is allowed. The mask would say more than the grammar, other masks could then leave no token where
# there is one, and a tokenizer that normalises text could force a token that does not match.
_OPTIONS = '\n%llguidance {"no_forcing": true}'

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(
    r"(?<!\\)((?:\\\\)*)\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))"
)
_REFUSED_OPTION = re.compile(
    r"^[ \t]*\w[\w-]*[ \t]*\[[^\]\n]*\b(temperature|max_tokens|stop)[ \t]*=", re.MULTILINE
)


class GrammarCompiler:
    """Turns grammars into matchers over one tokenizer; making one takes about a second.

    vocab_size: of the logits rows; rows past the tokenizer's ids are forbidden.
    eos_token_ids: each ends the text, whatever it says in the tokenizer.

    Raises InvalidRequestError("grammar") if no text could end, or if the tokenizer does not tell
    the bytes of its tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._eos = sorted(token for token in eos_token_ids if token < vocab_size)
        if not self._eos:
            raise InvalidRequestError(
                "grammar",
                "needs a model with an EOS token, which ends the text: set eos_token_id in its "
                "generation_config.json",
            )
        size = max(vocab_size, 1 + max(tokenizer.hf.get_vocab().values()))
        try:
            self._tokenizer: LLTokenizer = from_tokenizer(
                cast(Any, tokenizer.hf), size, self._eos[0]
            )
        except ValueError as error:
            raise InvalidRequestError(
                "grammar", f"cannot be matched with this model's tokenizer: {_one_line(error)}"
            ) from error

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of the text.

        Raises InvalidRequestError("grammar.<kind>") if the grammar does not compile, is too large,
        or admits no text.
        """
        field = f"grammar.{grammar.kind}"
        try:
            source = _lark(grammar, field)
            size = len(source.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(field, f"is not valid Unicode: {error}") from error
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                field, f"must be at most {MAX_GRAMMAR_BYTES} bytes long, is {size}"
            )
        matcher = self._matcher(source)
        # The first mask shows what compiling does not: that there is no text at all.
        if not matcher.is_error():
            matcher.compute_bitmask()
        _raise_fault(matcher, field)
        return GrammarMatcher(matcher, field, self._eos)

    def _matcher(self, source: str) -> LLMatcher:
        """The matcher of a grammar in Lark's notation, possibly in its error state."""
        limits = LLParserLimits(verbose_errors=False)

        def make() -> LLMatcher:
            return LLMatcher(self._tokenizer, source + _OPTIONS, log_level=0, limits=limits)

        with ThreadPoolExecutor(1, thread_name_prefix="grammar") as pool:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                matcher = pool.submit(make)
            finally:
                threading.stack_size(usual)
            return matcher.result()


class GrammarMatcher:
    """Where the answer of one request stands in its grammar.

    fault_field: of the errors that come up while matching.
    """

    field = "grammar"

    def __init__(self, matcher: LLMatcher, fault_field: str, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._fault_field = fault_field
        self._eos = list(eos_token_ids)
        self._has_ended = False

    def apply(self, row: Floats) -> None:
        """-inf in place for the tokens of a float32 [V] row that the grammar forbids next.

        EOS tokens are allowed exactly where the text may end, and alone where it cannot go on.
        Raises InvalidRequestError("grammar.<kind>") if no token of the vocabulary continues an
        unfinished text, or if matching takes more than llguidance's limits.
        """
        if self._has_ended or self._matcher.is_stopped():
            allowed = np.zeros(len(row), dtype=np.bool_)
            may_end = True
        else:
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(words, count=len(row), bitorder="little").view(np.bool_)
            may_end = self._matcher.is_accepting()
        _raise_fault(self._matcher, self._fault_field)
        allowed[self._eos] = may_end
        np.copyto(row, -np.inf, where=~allowed)

    def append(self, token_id: int) -> None:
        """The token was emitted. After an EOS nothing changes any more.

        Raises InvalidRequestError("grammar.<kind>") if the grammar forbids it.
        """
        if self._has_ended or token_id in self._eos:
            self._has_ended = True
            return
        self._matcher.consume_token(token_id)
        _raise_fault(self._matcher, self._fault_field)

    def prune(self, tree: TokenTree) -> TokenTree:
        """The tree without the drafted nodes that the grammar forbids and what hangs below them.

        The matcher stays as it is. No node that apply would allow is taken out; if a draft meets a
        limit of the matching, what was not looked at by then stays in.
        """
        if tree.num_drafted == 0:
            return tree
        dropped = set(self._forbidden(tree))
        if not dropped:
            return tree
        keep = [0]
        for node in range(1, tree.num_nodes):
            if node in dropped or tree.parents[node] in dropped:
                dropped.add(node)
            else:
                keep.append(node)
        return tree.select(keep)

    def fork(self) -> GrammarMatcher:
        """An independent matcher in the same state."""
        twin = GrammarMatcher(self._matcher.deep_copy(), self._fault_field, self._eos)
        twin._has_ended = self._has_ended
        return twin

    def _forbidden(self, tree: TokenTree) -> Iterator[int]:
        """The topmost forbidden nodes, depth first."""
        children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
        for node in range(1, tree.num_nodes):
            children[tree.parents[node]].append(node)
        if self._has_ended:
            yield from children[0]
            return
        # A copy, which takes microseconds: the error state of a matcher is for ever.
        matcher = self._matcher.deep_copy()
        untried, taken_back = 0, 1
        agenda = [(node, untried) for node in children[0]]
        while agenda:
            node, state = agenda.pop()
            token = tree.token_ids[node]
            if state == taken_back:
                matcher.rollback(1)
            elif token in self._eos:
                # Nothing comes after the end.
                yield from children[node] if matcher.is_accepting() else [node]
            elif matcher.is_stopped() or matcher.try_consume_tokens([token]) == 0:
                if matcher.is_error():
                    return
                yield node
            else:
                agenda.append((node, taken_back))
                agenda += [(child, untried) for child in children[node]]


def _lark(grammar: Grammar, field: str) -> str:
    """The grammar in Lark's notation, start being its start."""
    if grammar.json_object:
        return _json({"type": "object"}, field)
    if grammar.json_schema is not None:
        try:
            return _json(json.loads(str(grammar.json_schema)), field)
        except RecursionError as error:
            raise InvalidRequestError(field, "is nested too deeply") from error
    if grammar.regex is not None:
        return f"start: /{regex_to_lark(_unanchored(grammar.regex), '')}/"
    if grammar.choice is not None:
        # One terminal: of rules, "re" and "red" would compete by the lexer's precedences.
        texts = (json.dumps(text, ensure_ascii=False) for text in grammar.choice)
        return "start: CHOICE\nCHOICE: " + " | ".join(texts)
    assert grammar.ebnf is not None
    return _ebnf(grammar.ebnf, field)


def _json(schema: dict[str, Any], field: str) -> str:
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise InvalidRequestError(field, f"x-guidance must be a JSON object, got {own!r}")
    return "start: %json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS | own})


def _unanchored(pattern: str) -> str:
    """Without ^ in front and $ at the end, which say what holds anyway."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    backslashes = len(body) - len(body.rstrip("\\"))
    # In Lark, // begins a comment.
    return (body if backslashes % 2 == 0 else pattern) or "(?:)"


def _ebnf(text: str, field: str) -> str:
    if _GBNF_RULE.search(text):
        try:
            return gbnf_to_lark(_GBNF_ESCAPE.sub(_character, text))
        except Exception as error:  # the converter raises bare Exceptions
            raise InvalidRequestError(field, f"is not GBNF: {_one_line(error)}") from error
    option = _REFUSED_OPTION.search(text)
    if option is not None:
        raise InvalidRequestError(
            field, f"rules cannot have the option {option[1]} here; lazy and suffix can be used"
        )
    return text


def _character(escape: re.Match[str]) -> str:
    """The character that \\x, \\u or \\U stands for; llguidance's converter spoils the last two."""
    code = int(escape[2] or escape[3] or escape[4], 16)
    return escape[1] + (f"\\x{code:02X}" if code < 0x80 else chr(code))


def _raise_fault(matcher: LLMatcher, field: str) -> None:
    if matcher.is_error():
        message = _one_line(matcher.get_error())
        if field != "grammar.ebnf":
            # A place in the Lark text around the caller's.
            message = re.sub(r"^(at )?\d+\(\d+\): ", "", message)
        if message == "NoExtensionBias":
            message = "no token of this model continues the text so far, and it is not finished"
        raise InvalidRequestError(field, message)


def _one_line(error: object) -> str:
    """llguidance's message without its listing of the grammar, which is the caller's."""
    lines = str(error).replace("<non-verbose/>", "").splitlines()
    told = [line for line in lines if not re.match(r"\s*(\d+ \||\^+\s*$)", line)]
    text = " ".join(" ".join(told).split())
    return text if len(text) <= 300 else text[:297] + "..."
