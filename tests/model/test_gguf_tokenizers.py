"""Tokenizers out of GGUF files, against the original tokenizer's class or algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.model.gguf_tokenizer import end_token_ids, gguf_tokenizer
from specdec.tokenizer import Tokenizer
from tests.model import tiny
from tests.model.gguf_vocabularies import (
    CONTROL,
    GPT2,
    GPT4O,
    LLAMA3,
    NORMAL,
    QWEN2,
    TEKKEN,
    TEXTS,
    UNUSED,
    USER_DEFINED,
    header_of,
    sentencepiece_header,
    sentencepiece_ids,
    sentencepiece_vocabulary,
    split_by,
    trained,
)


@pytest.mark.parametrize(
    ("pre", "expressions", "nfc"),
    [
        ("gpt-2", [GPT2], False),
        ("smollm", [r"\p{N}", GPT2], False),
        ("command-r", [r"\p{N}", GPT2], True),
        ("llama-bpe", [LLAMA3], False),
        ("dbrx", [LLAMA3], False),
        ("qwen2", [QWEN2], True),
        ("stablelm2", [QWEN2], False),
        ("tekken", [TEKKEN], False),
        ("gpt-4o", [GPT4O], False),
    ],
)
def test_byte_level(pre: str, expressions: list[str], nfc: bool, tmp_path: Path) -> None:
    """The same ids as a tokenizer made of the expressions in the model's own tokenizer.json."""
    from tokenizers import Tokenizer as Core
    from tokenizers import models, normalizers

    splitter, normalizer = split_by(*expressions), normalizers.NFC() if nfc else None
    vocab, merges = trained(splitter, normalizer)
    tokens = sorted(vocab, key=vocab.__getitem__)
    header = header_of(
        tmp_path / "vocabulary.gguf",
        "llama",
        model="gpt2",
        pre=pre,
        tokens=tokens,
        merges=merges,
        token_type=[CONTROL] * 2 + [NORMAL] * (len(tokens) - 2),
        bos_token_id=0,
        eos_token_id=1,
    )
    tokenizer = gguf_tokenizer(header, 128)
    assert tokenizer is not None
    original = Core(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    original.pre_tokenizer = splitter
    if normalizer is not None:
        original.normalizer = normalizer
    bos = [0] if pre in ("llama-bpe", "tekken") else []
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == bos + original.encode(text).ids, text
        if not nfc:
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("a<|end|>b").input_ids.count(1) == 1
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")
    assert tokenizer.chat_template is None


def test_qwen2_as_its_own_class(tmp_path: Path) -> None:
    from tokenizers import normalizers
    from transformers import Qwen2Tokenizer

    vocab, merges = trained(split_by(QWEN2), normalizers.NFC())
    tokens = sorted(vocab, key=vocab.__getitem__)
    keys = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": merges}
    tokenizer = gguf_tokenizer(header_of(tmp_path / "vocabulary.gguf", "qwen2", **keys), None)
    original = Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    assert tokenizer is not None
    for text in TEXTS:
        assert tokenizer(text).input_ids == original(text).input_ids, text


def test_whole_words_before_merges(tmp_path: Path) -> None:
    """Llama 3 takes a piece that is a token at once, even one that its merges do not build."""
    tokens = [*tiny.vocabulary(), "Ġhello"]
    keys = {"model": "gpt2", "tokens": tokens, "merges": tiny.MERGES}
    for pre, expected in (("llama-bpe", ["Ġhello"]), ("dbrx", list("Ġhello"))):
        header = header_of(tmp_path / f"{pre}.gguf", "llama", pre=pre, **keys)
        tokenizer = gguf_tokenizer(header, None)
        assert tokenizer is not None
        assert tokenizer.tokenize(" hello") == expected


def test_sentencepiece(tmp_path: Path) -> None:
    tokens, scores, _ = sentencepiece_vocabulary()
    tokenizer = gguf_tokenizer(sentencepiece_header(tmp_path / "vocabulary.gguf"), 128)
    assert tokenizer is not None
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == [1, *sentencepiece_ids(f" {text}" if text else "", tokens, scores)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    # Merged pieces and bytes both occur: the comparison is not of single characters only.
    assert max(len(tokens[index]) for index in tokenizer(TEXTS[2]).input_ids) > 3
    assert tokens.index("<0xF0>") in tokenizer("🙂").input_ids


def test_sentencepiece_around_special_tokens(tmp_path: Path) -> None:
    """Each stretch of text begins with a space of its own, as in llama.cpp and Llama 2."""
    tokenizer = gguf_tokenizer(sentencepiece_header(tmp_path / "vocabulary.gguf"), 128)
    assert tokenizer is not None
    tokens, scores, _ = sentencepiece_vocabulary()
    piece, user = sentencepiece_ids(" a", tokens, scores), tokens.index("<|user|>")
    ids = tokenizer("a<|user|>a</s>a").input_ids
    assert ids == [1, *piece, user, *piece, 2, *piece]
    assert tokenizer.decode(tokenizer("</s>a").input_ids, skip_special_tokens=True) == "a"


def test_sentencepiece_without_prefix(tmp_path: Path) -> None:
    tokens, scores, _ = sentencepiece_vocabulary()
    header = sentencepiece_header(
        tmp_path / "vocabulary.gguf", add_space_prefix=False, add_bos_token=False
    )
    tokenizer = gguf_tokenizer(header, 128)
    assert tokenizer is not None
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == sentencepiece_ids(text, tokens, scores), text
        assert tokenizer.decode(ids) == text


def test_gemma(tmp_path: Path) -> None:
    """Merges in the order of the ids, and runs of spaces that are stored as spaces."""
    spelt, _, kinds = sentencepiece_vocabulary()
    spelt, kinds = [*spelt, "▁▁▁", "<table>"], [*kinds, NORMAL, USER_DEFINED]
    runs = [len(token) > 1 and not token.strip("▁") for token in spelt]
    assert sum(runs) == 2
    tokens = [" " * len(token) if run else token for token, run in zip(spelt, runs, strict=True)]
    kinds = [USER_DEFINED if run else kind for kind, run in zip(kinds, runs, strict=True)]
    header = sentencepiece_header(
        tmp_path / "vocabulary.gguf",
        "gemma2",
        tokens=tokens,
        scores=[-1000.0] * len(tokens),  # to be left aside
        token_type=kinds,
        add_space_prefix=False,
    )
    tokenizer = gguf_tokenizer(header, 128)
    assert tokenizer is not None
    by_id = [-float(index) for index in range(len(tokens))]
    for text in TEXTS:
        assert tokenizer(text).input_ids == [1, *sentencepiece_ids(text, spelt, by_id)], text
    assert tokenizer.tokenize("a   b<table>c") == ["a", "▁▁▁", "b", "<table>", "c"]


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
def test_text_comes_piece_by_piece(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    if kind == "sentencepiece":
        header = sentencepiece_header(path)
    else:
        keys = {"model": "gpt2", "pre": "gpt-2", "merges": tiny.MERGES}
        header = header_of(path, "gpt2", tokens=tiny.vocabulary(), **keys)
    hf = gguf_tokenizer(header, 128)
    assert hf is not None
    tokenizer = Tokenizer(hf)
    for text in TEXTS:
        ids, stream = tokenizer.encode(text), tokenizer.stream()
        pieces = [stream.push(token) for token in ids]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids) == text


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("ends", [False, True])
def test_ends_of_text(flags: dict[str, bool], ends: bool, tmp_path: Path) -> None:
    header = sentencepiece_header(tmp_path / "vocabulary.gguf", add_eos_token=ends, **flags)
    tokenizer = gguf_tokenizer(header, 128)
    assert tokenizer is not None
    ids = tokenizer("a").input_ids
    assert (ids[0] == 1) == flags.get("add_bos_token", True)
    assert (ids[-1] == 2) == ends


def test_fillers_are_no_tokens(tmp_path: Path) -> None:
    size = len(tiny.vocabulary())
    fillers = [f"[PAD{index}]" for index in range(size, size + 5)]
    header = header_of(
        tmp_path / "vocabulary.gguf",
        "qwen2",
        model="gpt2",
        tokens=[*tiny.vocabulary(), *fillers],
        token_type=[NORMAL] * size + [UNUSED] * 5,
        merges=tiny.MERGES,
    )
    tokenizer = gguf_tokenizer(header, 128)
    assert tokenizer is not None
    assert len(tokenizer) == size


def test_no_tokenizer(tmp_path: Path) -> None:
    assert gguf_tokenizer(header_of(tmp_path / "none.gguf", "llama"), 128) is None
    assert gguf_tokenizer(header_of(tmp_path / "no.gguf", "llama", model="no_vocab"), 128) is None


END_NAMES = ["<eos>", "<eot>", "<eom>", "<end_of_turn>"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"eos_token_id": 0}, [0]),
        ({"eos_token_id": 0, "eot_token_id": 1, "eom_token_id": 2}, [0, 1, 2]),
        ({"eos_token_id": 0, "eot_token_id": 0}, [0]),
        ({"eos_token_id": 0, "chat_template": "x<end_of_turn>"}, [0, 3]),
        ({"eos_token_id": 0, "chat_template": "x<|im_end|>"}, [0]),
        ({"eos_token_id": 0, "eot_token_id": 1, "chat_template": "<end_of_turn>"}, [0, 1]),
    ],
)
def test_every_end_token(keys: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    header = header_of(tmp_path / "vocabulary.gguf", "llama", tokens=END_NAMES, **keys)
    assert end_token_ids(header) == expected


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"model": "t5"}, ["tokenizer 't5' is not read", "gpt2 (byte-level BPE)"]),
        ({"model": "bert"}, ["tokenizer 'bert' is not read", "use the model's safetensors"]),
        ({"pre": "klingon"}, ["tokenizer.ggml.pre 'klingon', is not read", "llama-bpe", "smollm"]),
        ({"pre": "default"}, ["tokenizer.ggml.pre 'default', is not read"]),
        ({"merges": None}, ["has no tokenizer.ggml.merges"]),
        ({"merges": ["a b"]}, ["cannot build a tokenizer"]),
        ({"eos_token_id": 9999}, ["eos_token_id is 9999, of 262 tokens"]),
        ({"tokens": ["a", "a"]}, ["tokens 0 and 1 are both 'a'"]),
        ({"token_type": [1, 1]}, ["cannot build a tokenizer"]),
        ({"model": "llama"}, ["has no score for each token"]),
    ],
)
def test_refusals(keys: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    valid: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tiny.vocabulary(),
        "merges": tiny.MERGES,
    }
    values = {key: value for key, value in (valid | keys).items() if value is not None}
    header = header_of(tmp_path / "vocabulary.gguf", "llama", **values)
    message = tiny.error_line(gguf_tokenizer, header, 128)
    for part in parts:
        assert part in message


def test_the_architecture_says_it_where_the_file_does_not(tmp_path: Path) -> None:
    keys = {"model": "gpt2", "tokens": tiny.vocabulary(), "merges": tiny.MERGES}
    for name, pre in (("gpt2", {}), ("qwen2", {"pre": "default"})):
        header = header_of(tmp_path / f"{name}.gguf", name, **keys, **pre)
        assert gguf_tokenizer(header, 128) is not None
    assert "tokenizer.ggml.pre 'default'" in tiny.error_line(
        gguf_tokenizer, header_of(tmp_path / "llama.gguf", "llama", **keys), 128
    )
