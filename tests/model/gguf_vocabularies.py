"""Vocabularies for GGUF files, and the algorithms and expressions that tokenizers follow."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specdec.model.gguf_header import GgufHeader, read_gguf_header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIALS = ["<|begin|>", "<|end|>"]

TEXTS = [
    "",
    " ",
    "Hello world, hello World!",
    "I'LL we'll they're 'tis it's don't DON'T",
    "1234567 3.14 2024-12-31 x86_64 v10",
    "  two   spaces \t tabs\n\n\n1. next\r\n  line  ",
    "e\u0301te\u0301 naïve Ångström A\u030angstro\u0308m",
    "漢字かな 한국어 кириллица",
    "🙂👩‍👩‍👧 ½ ² Ⅷ",
    "camelCaseHTTPServer XMLHttpRequest",
    "path/to/file/\n\n// comment\n/* x */",
    "def f(x):\n    return x**2  # 'quoted'\n",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog and then the hello world"] * 4


def header_of(path: Path, architecture: str, **keys: Any) -> GgufHeader:
    """A GGUF file of tokenizer keys, given without their prefix, and a token embedding."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf_header(path)


def trained(pre_tokenizer: Any, normalizer: Any = None) -> tuple[dict[str, int], list[str]]:
    """Vocabulary and merges of a byte-level BPE trained on CORPUS behind a way of splitting."""
    from tokenizers import Tokenizer as Core
    from tokenizers import models, pre_tokenizers, trainers

    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        core.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    model = json.loads(core.to_str())["model"]
    return model["vocab"], [" ".join(merge) for merge in model["merges"]]


def split_by(*expressions: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, last])


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sentencepiece_ids(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """llama.cpp's algorithm for SentencePiece vocabularies: the best-scored pair first, the left
    one of equals; what is no token goes out as bytes.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        known = [(-scores[ids[pair]], at) for at, pair in enumerate(pairs) if pair in ids]
        if not known:
            break
        at = min(known)[1]
        symbols[at : at + 2] = [pairs[at]]
    found: list[int] = []
    for symbol in symbols:
        if symbol in ids:
            found.append(ids[symbol])
        else:
            found += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Special tokens, bytes, merged pieces best first, then characters: as SentencePiece stores it.

    Only Latin characters are in it: the others fall back on bytes.
    """
    from tokenizers import Tokenizer as Core
    from tokenizers import models, trainers

    core = Core(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False)
    latin = [re.sub("[^\x00-\u024f]", "", text).replace(" ", "▁") for text in CORPUS]
    core.train_from_iterator(latin, trainer)
    merges = json.loads(core.to_str())["model"]["merges"]
    pieces = list(dict.fromkeys(a + b for a, b in merges))
    characters = sorted(set("".join(pieces)) | set("▁abcdefghijklmnopqrstuvwxyz"))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, *characters, "<|user|>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(characters))] + [-1000.0]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    kinds += [NORMAL] * (len(pieces) + len(characters)) + [USER_DEFINED]
    return tokens, scores, kinds


def sentencepiece_header(path: Path, architecture: str = "llama", **changes: Any) -> GgufHeader:
    tokens, scores, kinds = sentencepiece_vocabulary()
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | changes
    return header_of(path, architecture, **keys)
