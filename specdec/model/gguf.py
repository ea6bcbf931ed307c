"""Turning a GGUF file into a folder of bf16 safetensors that transformers loads in a second."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.model.cache_folder import (
    cannot_write,
    conversions_dir,
    exclusive,
    new_folder,
    read_marker,
)
from specdec.model.gguf_header import GgufHeader, read_gguf_header
from specdec.model.memory import require_memory
from specdec.model.progress import progress_bar, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Raise it whenever a conversion would come out differently: old folders are then converted anew.
CONVERTER_VERSION = 1

# llama.cpp's vocabularies that split digits one by one before GPT-2's own split.
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

# Unpacking goes through one fp32 copy of the model beside the bf16 one.
_BYTES_PER_WEIGHT = 6


def convert_gguf(path: Path, *, sha256: str | None = None) -> Path:
    """The converted form of the GGUF file at `path`, made on the first call.

    Args:
        path: the file.
        sha256: the file's checksum where it is known; otherwise the folder is keyed by the file's
            size, modification time and header.

    Returns:
        A folder in the cache with `config.json`, bf16 safetensors, generation config, tokenizer
        and chat template.

    Raises:
        ModelError: unreadable, corrupt or split file, architecture that transformers does not read,
            too little memory, cache not writable.
    """
    folder = conversion_folder(path, sha256 or _fingerprint(path))
    if read_marker(folder) is not None:
        return folder
    with exclusive(folder.name):
        if read_marker(folder) is None:
            _convert(path, folder)
    return folder


def conversion_folder(path: Path, key: str) -> Path:
    """Where the conversion of a file with this name and key lies, made or not."""
    digest = hashlib.sha256(f"{CONVERTER_VERSION}:{key}".encode()).hexdigest()[:12]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name.removesuffix(".gguf"))
    return conversions_dir() / f"{stem}-{digest}"


def _fingerprint(path: Path) -> str:
    try:
        stat = path.stat()
        with path.open("rb") as stream:
            head = stream.read(1 << 16)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    return f"{stat.st_size}:{stat.st_mtime_ns}:{hashlib.sha256(head).hexdigest()}"


def _convert(path: Path, folder: Path) -> None:
    header = read_gguf_header(path)
    if int(header.metadata.get("split.count", 0)) > 1:
        raise ModelError(
            f"{path} is one part of a split GGUF: join the parts first "
            "(llama-gguf-split --merge FIRST_PART OUTPUT)"
        )
    require_memory(header.num_elements * _BYTES_PER_WEIGHT, what=f"converting {path.name}")
    marker = {
        "kind": "gguf",
        "source": str(path.absolute()),
        "converter_version": CONVERTER_VERSION,
    }
    title = f"Converting {path.name} (once)"
    with new_folder(folder, marker) as work, progress_bar(title, total=4) as advance:
        with tempfile.TemporaryDirectory(prefix="specdec-gguf-") as alone:
            # transformers also reads a config or tokenizer that lies beside the file.
            (Path(alone) / path.name).symlink_to(path.absolute())
            model = _load_model(path, Path(alone), header)
            advance(2)
            tokenizer = _load_tokenizer(path, Path(alone), header, model.config)
        tokenizer.save_pretrained(work)
        advance(1)
        _save_model(model, header, work)
        advance(1)


def _load_model(path: Path, folder: Path, header: GgufHeader) -> PreTrainedModel:
    """The file's model with every weight unpacked to bf16."""
    import torch
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # From 5.24 on, transformers may keep the weights packed and unpack them in every matmul.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        # Its unpacking loop draws a bar of its own that no setting turns off.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                gguf_file=path.name,
                dtype=torch.bfloat16,
                output_loading_info=True,
                local_files_only=True,
                **options,
            )
    except Exception as error:
        raise ModelError(
            f"transformers cannot read {path} (GGUF architecture {header.architecture!r}): "
            f"{error}; use the model's safetensors checkpoint instead"
        ) from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of the model's weights, {missing[0]} first: "
            "use a complete GGUF file or the model's safetensors checkpoint"
        )
    return model


def _load_tokenizer(
    path: Path, folder: Path, header: GgufHeader, config: Any
) -> PreTrainedTokenizerBase:
    """The file's tokenizer, made to say what the file says."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, gguf_file=path.name, local_files_only=True
            )
    except Exception as error:
        raise ModelError(
            f"cannot build a tokenizer from {path}: {error}; use the model's safetensors "
            "checkpoint instead"
        ) from error
    _set_special_tokens(tokenizer, header)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        _set_byte_level(tokenizer, header)
    tokenizer.model_max_length = getattr(config, "max_position_embeddings", None) or int(1e30)
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def _set_special_tokens(tokenizer: Any, header: GgufHeader) -> None:
    """Give the special tokens the file's ids; older transformers mixes some of them up."""
    for name, key in _SPECIAL_KEYS.items():
        token_id = header.metadata.get(f"tokenizer.ggml.{key}")
        if token_id is not None and getattr(tokenizer, f"{name}_id") != token_id:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(token_id)))


def _set_byte_level(tokenizer: Any, header: GgufHeader) -> None:
    """Split text and put BOS before it as a byte-level vocabulary's own tokenizer does."""
    from tokenizers import pre_tokenizers, processors

    tokenizer.clean_up_tokenization_spaces = False
    if header.metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        # transformers 5.24 leaves GPT-2's split here, which tears "\n\n1" into "\n", "\n", "1".
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    asked = header.metadata.get("tokenizer.ggml.add_bos_token") and bos_id is not None
    if asked and tokenizer("a").input_ids[:1] != [bos_id]:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )


def _save_model(model: PreTrainedModel, header: GgufHeader, work: Path) -> None:
    """Write the unpacked model as if it had never been a GGUF."""
    from safetensors import SafetensorError
    from transformers import GenerationConfig

    config = model.config
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    model.hf_quantizer = None  # type: ignore[assignment]
    ids = {key: header.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS}
    eos = list(dict.fromkeys(int(token) for token in ids.values() if token is not None))
    model.generation_config = GenerationConfig(
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        pad_token_id=header.metadata.get("tokenizer.ggml.padding_token_id"),
    )
    try:
        with quiet_transformers():
            model.save_pretrained(work)
    except SafetensorError as error:
        raise cannot_write(error) from error
