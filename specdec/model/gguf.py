"""Turning a GGUF file into a folder of bf16 safetensors that transformers loads in a second."""

from __future__ import annotations

import hashlib
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import ModelError
from specdec.model.cache_folder import (
    cannot_write,
    conversions_dir,
    exclusive,
    new_folder,
    read_marker,
)
from specdec.model.gguf_config import gguf_config
from specdec.model.gguf_header import GgufHeader, read_gguf_header
from specdec.model.gguf_tokenizer import end_token_ids, gguf_tokenizer
from specdec.model.gguf_weights import check_quantisations, load_weights, read_tensor
from specdec.model.memory import require_memory
from specdec.model.progress import progress_bar, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Raise it whenever a conversion would come out differently: old folders are then converted anew.
CONVERTER_VERSION = 2

# The bf16 model, and what unpacking and saving take beside it.
_BYTES_PER_WEIGHT = 3


def convert_gguf(path: Path, *, sha256: str | None = None) -> Path:
    """The converted form of the GGUF file at `path`, made on the first call.

    Args:
        path: the file.
        sha256: the file's checksum where it is known; otherwise the folder is keyed by the file's
            size, modification time and header.

    Returns:
        A folder in the cache with `config.json`, bf16 safetensors, generation config and, if the
        file has them, tokenizer and chat template.

    Raises:
        ModelError: unreadable, corrupt or split file; an architecture, a setting of it, a
            quantisation, a tokenizer or a tensor that is not read, by name; too little memory;
            cache not writable.
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
    check_quantisations(header)
    with quiet_transformers():
        config = gguf_config(header, partial(read_tensor, header))
        tokenizer = gguf_tokenizer(header, getattr(config, "max_position_embeddings", None))
    require_memory(header.num_elements * _BYTES_PER_WEIGHT, what=f"converting {path.name}")
    marker = {
        "kind": "gguf",
        "source": str(path.absolute()),
        "converter_version": CONVERTER_VERSION,
    }
    with new_folder(folder, marker) as work:
        _save_model(_load_model(header, config), header, work)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)


def _load_model(header: GgufHeader, config: PreTrainedConfig) -> PreTrainedModel:
    """The file's model with every weight unpacked to bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    with quiet_transformers(), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    title = f"Converting {header.path.name} (once)"
    with progress_bar(title, total=2 * header.num_elements, unit="bytes") as advance:
        load_weights(model, header, lambda weights: advance(2 * weights))
    return model


def _save_model(model: PreTrainedModel, header: GgufHeader, work: Path) -> None:
    from safetensors import SafetensorError
    from transformers import GenerationConfig

    ends = end_token_ids(header)
    model.generation_config = GenerationConfig(
        bos_token_id=header.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=header.metadata.get("tokenizer.ggml.padding_token_id"),
    )
    try:
        with quiet_transformers():
            model.save_pretrained(work)
    except SafetensorError as error:
        raise cannot_write(error) from error
