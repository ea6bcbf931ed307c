"""From the vocabulary in a GGUF file to a fast tokenizer that cuts text as the model learned it.

The file names its way of splitting text but does not hold it; the expressions here are those of the
models' own tokenizer.json files (listed in llama.cpp, src/llama-vocab.cpp, beside its adaptions).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.model.gguf_header import GgufHeader

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_NO_TOKENIZER = (None, "none", "no_vocab")

_INSTEAD = "use the model's safetensors checkpoint instead"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{{end}}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{{end}}"
)
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED.replace("{end}", "") + r"|\p{N}|" + _SLASHED
_GPT4O = _CASED.replace("{end}", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}|" + _SLASHED


@dataclass(frozen=True)
class _Split:
    """How byte-level text is cut before merging.

    expression: None is GPT-2's own. single_digits: digits are cut off one by one first.
    whole_words: a piece that is a token is taken at once, whatever the merges say. adds_bos: BOS
    comes before text unless the file says otherwise. nfc: text is composed first.
    """

    expression: str | None = None
    single_digits: bool = False
    whole_words: bool = False
    adds_bos: bool = False
    nfc: bool = False


_SPLITS: dict[str, _Split] = {
    name: split
    for names, split in [
        ("gpt-2 phi-2 mpt olmo jais exaone4 gigachat a.x-4.0 mellum trillion", _Split()),
        (
            "smollm starcoder refact codeshell exaone minerva-7b mellum2",
            _Split(single_digits=True),
        ),
        ("command-r", _Split(single_digits=True, nfc=True)),
        (
            "llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0",
            _Split(_LLAMA3, whole_words=True, adds_bos=True),
        ),
        ("dbrx smaug-bpe glm4 chatglm-bpe", _Split(_LLAMA3)),
        ("qwen2 deepseek-r1-qwen megrez kormo", _Split(_QWEN2, nfc=True)),
        ("stablelm2 hunyuan solar-open", _Split(_QWEN2)),
        ("tekken", _Split(_TEKKEN, whole_words=True, adds_bos=True)),
        ("gpt-4o llama4 kanana2", _Split(_GPT4O)),
    ]
    for name in names.split()
}

# What a file without a name for it, or with llama.cpp's "default", must have meant.
_SPLIT_OF_ARCHITECTURE = {
    "command-r": "command-r",
    "gpt2": "gpt-2",
    "gptneox": "olmo",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "starcoder2": "starcoder",
}

_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def gguf_tokenizer(header: GgufHeader, max_length: int | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a GGUF file, with its chat template; None if the file has none.

    Args:
        header: of the file.
        max_length: of the model's context.

    Raises:
        ModelError: a kind of tokenizer or of splitting that is not read (names it), or a vocabulary
            that makes no sense.
    """
    from transformers import PreTrainedTokenizerFast

    vocabulary = _Vocabulary(header)
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind in _NO_TOKENIZER:
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{header.path}: tokenizer {kind!r} is not read; those that are: gpt2 (byte-level BPE),"
            f" llama (SentencePiece BPE); {_INSTEAD}"
        )
    try:
        backend = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
        vocabulary.add_special_tokens(backend)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"cannot build a tokenizer from {header.path}: {error}; {_INSTEAD}"
        ) from error
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{name}_token": vocabulary.special(key) for name, key in names.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length or int(1e30),
        **{name: token for name, token in special.items() if token is not None},
    )
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    return tokenizer


def end_token_ids(header: GgufHeader) -> list[int]:
    """Ids that end a text: those that the file names for text, turn and message.

    A file from before turns had an id of their own gets it from the chat template.
    """
    found = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if found[1] is None:
        template = str(header.metadata.get("tokenizer.chat_template", ""))
        tokens = header.metadata.get("tokenizer.ggml.tokens", [])
        found += [tokens.index(end) for end in _TURN_ENDS if end in template and end in tokens]
    return list(dict.fromkeys(int(token) for token in found if token is not None))


class _Vocabulary:
    """Tokens, their kinds and the flags that concern them."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.tokens: list[str] = header.metadata.get("tokenizer.ggml.tokens", [])
        kinds = self._get("token_type")
        self.kinds: list[int] = kinds if kinds is not None else [_NORMAL] * len(self.tokens)

    def _get(self, key: str) -> Any:
        return self.header.metadata.get(f"tokenizer.ggml.{key}")

    def special(self, key: str) -> str | None:
        """The token that the file names for a purpose, or None.

        Raises:
            ModelError: its id is no token.
        """
        token_id = self._get(f"{key}_token_id")
        if token_id is None:
            return None
        if token_id >= len(self.tokens):
            raise ModelError(
                f"{self.header.path}: tokenizer.ggml.{key}_token_id is {token_id}, of "
                f"{len(self.tokens)} tokens: the file is damaged; {_INSTEAD}"
            )
        return self.tokens[int(token_id)]

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        return default if value is None else bool(value)

    def ids(self) -> dict[str, int]:
        """Token to id, without the fillers that pad a vocabulary to a round size.

        Raises:
            ModelError: two ids for one token.
        """
        ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            if not token or (self.kinds[index] == _UNUSED and token == f"[PAD{index}]"):
                continue
            if token in ids:
                raise ModelError(
                    f"{self.header.path}: tokens {ids[token]} and {index} are both {token!r}: "
                    f"{_INSTEAD}"
                )
            ids[token] = index
        return ids

    def merges(self, scores: dict[str, float] | None = None) -> list[tuple[str, str]]:
        """The file's merges, or those that its scores imply: the best token first.

        Raises:
            ModelError: it has neither.
        """
        listed = self._get("merges")
        if listed is not None:
            pairs = (merge.split(" ") for merge in listed)
            return [(left, right) for left, right in pairs]
        if scores is None:
            raise ModelError(f"{self.header.path} has no tokenizer.ggml.merges: {_INSTEAD}")
        pieces = [
            token
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in (_NORMAL, _USER_DEFINED) and token in scores
        ]
        known = set(pieces)
        found = [
            (scores[piece], piece[:cut], piece[cut:])
            for piece in pieces
            for cut in range(1, len(piece))
            if piece[:cut] in known and piece[cut:] in known
        ]
        found.sort(key=lambda merge: -merge[0])
        return [(left, right) for _, left, right in found]

    def scores(self) -> dict[str, float]:
        """Token to score.

        Raises:
            ModelError: the file has none.
        """
        scores = self._get("scores")
        if scores is None or len(scores) != len(self.tokens):
            raise ModelError(f"{self.header.path} has no score for each token: {_INSTEAD}")
        return dict(zip(self.tokens, scores, strict=True))

    def add_special_tokens(self, backend: Tokenizer) -> None:
        """Keep control tokens and user-defined ones whole wherever they stand in a text."""
        from tokenizers import AddedToken

        special, plain = [], []
        for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if backend.token_to_id(token) != index:  # an empty one, which no text can hold
                continue
            if kind in (_CONTROL, _UNKNOWN):
                special.append(AddedToken(token, special=True, normalized=False))
            elif kind == _USER_DEFINED:
                plain.append(AddedToken(token, special=False, normalized=False))
        backend.add_special_tokens(special)
        backend.add_tokens(plain)

    def set_ends(self, backend: Tokenizer, *, adds_bos: bool) -> None:
        """Put BOS before and EOS after a text as the file says."""
        from tokenizers import processors

        before = self.special("bos") if self.flag("add_bos_token", adds_bos) else None
        after = self.special("eos") if self.flag("add_eos_token", False) else None
        around = [before, "{}", after]
        single = [part.format("$A") for part in around if part is not None]
        second = [part.format("$B") for part in around if part is not None]
        ends = {token for token in (before, after) if token is not None}
        backend.post_processor = processors.TemplateProcessing(
            single=single,
            pair=single + second,
            special_tokens=[(token, self.tokens.index(token)) for token in ends],
        )


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = _split_of(vocabulary.header)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(), merges=vocabulary.merges(), ignore_merges=split.whole_words
        )
    )
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.expression is not None:
        steps.append(pre_tokenizers.Split(Regex(split.expression), "isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.expression is None)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    vocabulary.set_ends(backend, adds_bos=split.adds_bos)
    return backend


def _split_of(header: GgufHeader) -> _Split:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    if name == "default":
        name = _SPLIT_OF_ARCHITECTURE.get(header.architecture, name)
    if name not in _SPLITS:
        raise ModelError(
            f"{header.path}: its way of splitting text, tokenizer.ggml.pre {name!r}, is not read; "
            f"those that are: {', '.join(sorted(_SPLITS))}; take a file that a current llama.cpp "
            "has made, or the model's safetensors checkpoint"
        )
    return _SPLITS[name]


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids, scores = vocabulary.ids(), vocabulary.scores()
    if vocabulary.header.architecture.startswith("gemma"):
        # Its runs of spaces are stored as such, and its scores are not in the order of its merges,
        # which is that of the ids.
        vocabulary.tokens = [_respelled(token) for token in vocabulary.tokens]
        ids = vocabulary.ids()
        scores = {token: -float(index) for token, index in ids.items()}
    unknown = vocabulary.special("unknown")
    if unknown is None and _UNKNOWN in vocabulary.kinds:
        unknown = vocabulary.tokens[vocabulary.kinds.index(_UNKNOWN)]
    backend = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=vocabulary.merges(scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    vocabulary.set_ends(backend, adds_bos=True)
    return backend


def _respelled(token: str) -> str:
    return "▁" * len(token) if re.fullmatch(" {2,}", token) else token
