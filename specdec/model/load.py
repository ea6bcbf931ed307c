"""Loading a model with its tokenizer, checked before and after."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.model.adapter import Adapter, check_mergeable, is_adapter, merge_adapter, read_adapter
from specdec.model.architecture import load_config
from specdec.model.folder import read_json, weight_files
from specdec.model.memory import require_memory
from specdec.model.progress import quiet_transformers
from specdec.model.resolve import resolve_adapter, resolve_base, resolve_model

if TYPE_CHECKING:
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
}

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "spiece.model",
    "tekken.json",
)

_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
}


@dataclass
class LoadedModel:
    """A causal language model in memory.

    Attributes:
        model: the transformers module.
        tokenizer: its tokenizer, or None if the checkpoint has none.
        path: the folder it came from; None for a module that lives in memory only, and for one
            with an adapter merged into it.
        source: where it came from, in words for a person.
        generation_config: the checkpoint's, or transformers' defaults.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    path: Path | None
    generation_config: GenerationConfig
    source: str
    _is_module: bool = field(default=False, repr=False)
    _reload: Callable[[], PreTrainedModel] | None = field(default=None, repr=False)
    _saved: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def model_path(self) -> Path:
        """A folder that transformers can load this model from.

        A model without a folder of its own, or whose weights have changed since it was loaded from
        one, is saved to a temporary one on the first call; that folder goes when this object does.
        One with an adapter is merged again for that, since an engine may have given up the weights
        in memory.
        """
        if self._saved is not None:
            return Path(self._saved.name)
        path = self.path
        if path is not None and (not self._is_module or _holds_weights_of(path, self.model)):
            return path
        saved = tempfile.TemporaryDirectory(prefix="specdec-model-")
        model = self.model if self._reload is None else self._reload()
        with quiet_transformers():
            model.save_pretrained(saved.name)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(saved.name)
        self._saved = saved
        return Path(saved.name)


def load_model(
    spec: str | os.PathLike[str],
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    adapter: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Load a model for inference: evaluation mode, no gradients.

    Args:
        spec: a catalog name, a folder, a `.gguf` file or a hub id (see `resolve_model`).
        dtype: of the weights; `"auto"` is the checkpoint's own.
        device: where the weights go.
        trust_remote_code: allow a checkpoint to bring its own Python code.
        adapter: the folder or hub id of a LoRA adapter to merge into the weights. A tokenizer that
            lies with the adapter is taken instead of the base's.

    Raises:
        ModelError: what `resolve_model` raises; an unsupported architecture, dtype or device; too
            little memory; weights that do not belong to the config; an adapter that cannot be
            merged, or belongs to another model.
    """
    wanted, place = parse_dtype(dtype), _parse_device(device)
    path, merged = _with_adapter(spec, adapter)
    config = load_config(path, trust_remote_code=trust_remote_code)
    needed = weights_bytes(path, wanted)
    if merged is not None:
        check_mergeable(merged, config, path)
        needed += merged.num_bytes
    require_memory(needed, what=f"loading {path.name}", available=_device_memory(place))
    load = partial(_load_module, path, config, wanted, trust_remote_code, merged)
    model = load()
    model.to(place)  # type: ignore[arg-type]
    model.eval().requires_grad_(False)
    tokenizer = None
    for folder in [path] if merged is None else [merged.folder, path]:
        tokenizer = tokenizer or load_tokenizer(folder, trust_remote_code=trust_remote_code)
    defaults = _generation_config(model)
    if merged is None:
        return LoadedModel(model, tokenizer, path, defaults, str(path))
    source = f"{path} with the adapter {merged.folder}"
    return LoadedModel(model, tokenizer, None, defaults, source, _reload=load)


def from_module(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> LoadedModel:
    """Wrap a loaded transformers module; the module itself is not changed in any way.

    Raises:
        ModelError: not a causal language model, or one with adapters that are not merged.
    """
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        raise ModelError(
            f"this {type(model).__name__} has adapters beside its weights: merge them (peft's "
            "merge_and_unload) and give the merged module"
        )
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model).__name__} is no causal language model: give a module with a language "
            "model head (AutoModelForCausalLM)"
        )
    folder = Path(model.name_or_path) if model.name_or_path else None
    local = folder is not None and (folder / "config.json").is_file()
    path = folder.absolute() if folder and local else None
    source = f"a loaded {type(model).__name__}"
    defaults = _generation_config(model)
    return LoadedModel(model, tokenizer, path, defaults, source, _is_module=True)


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The torch dtype that `dtype` names; None for `"auto"`.

    Raises:
        ModelError: not a floating dtype that models run in.
    """
    import torch

    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    else:
        name = dtype.strip().lower().removeprefix("torch.")
    if name == "auto":
        return None
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported: use auto, bf16, fp16 or fp32")
    found: torch.dtype = getattr(torch, _DTYPES[name])
    return found


def weights_bytes(folder: Path, dtype: torch.dtype | None = None) -> int:
    """Bytes that the weights in `folder` take once loaded in `dtype` (None: as they are stored)."""
    total = 0
    for file in weight_files(folder):
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for tensor in header.values():
            start, end = tensor["data_offsets"]
            stored = _ITEM_BYTES.get(tensor["dtype"])
            # Only plain floats are cast; packed integers of a quantised model stay as they are.
            factor = dtype.itemsize / stored if dtype is not None and stored else 1.0
            total += int((end - start) * factor)
    return total


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in `folder`, or None if there is none.

    Raises:
        ModelError: there is one, but it cannot be read.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:
        if not trust_remote_code and _brings_code(folder / "tokenizer_config.json"):
            raise ModelError(
                f"the tokenizer in {folder} brings its own code: if you trust it, set "
                "trust_remote_code (--trust-remote-code)"
            ) from error
        raise ModelError(
            f"the tokenizer in {folder} cannot be read ({error}): download its files again"
        ) from error
    return tokenizer


def _with_adapter(
    spec: str | os.PathLike[str], adapter: str | os.PathLike[str] | None
) -> tuple[Path, Adapter | None]:
    """The folder of the model itself, and the adapter to merge into it."""
    path = resolve_model(spec)
    if not is_adapter(path):
        return path, None if adapter is None else resolve_adapter(adapter)
    if adapter is not None:
        raise ModelError(f"{path} is an adapter itself: give its base as the model, or it alone")
    own = read_adapter(path)
    return resolve_base(own), own


def _load_module(
    path: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    adapter: Adapter | None,
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype if dtype is not None else "auto",
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
            )
    except MemoryError as error:
        raise ModelError(
            f"loading {path.name} ran out of memory: close other programs, use a smaller model or "
            "a smaller dtype"
        ) from error
    except Exception as error:
        raise ModelError(
            f"transformers cannot load {path}: {_first_line(error)}; check that the weights belong "
            "to the config"
        ) from error
    model: PreTrainedModel = loaded[0]
    # transformers fills what is missing with random numbers, and says so in a warning only.
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of the weights that its config asks for, {missing[0]} "
            "first: download the checkpoint again, or correct its config"
        )
    return model if adapter is None else merge_adapter(model, adapter, path)


def _holds_weights_of(folder: Path, model: PreTrainedModel) -> bool:
    """Whether a module still has the weights of its folder: it may have been trained, or an adapter
    merged into it.
    """
    import torch
    from safetensors import safe_open

    own = model.state_dict()
    try:
        files = weight_files(folder)
    except ModelError:
        return False
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in own.keys() & set(tensors.keys()):
                stored = tensors.get_tensor(name).to(own[name])
                if not torch.equal(stored, own[name]):
                    return False
    return True


def _brings_code(config: Path) -> bool:
    return config.is_file() and bool(read_json(config).get("auto_map"))


def _generation_config(model: PreTrainedModel) -> GenerationConfig:
    from transformers import GenerationConfig

    own = getattr(model, "generation_config", None)
    return own if own is not None else GenerationConfig.from_model_config(model.config)


def _parse_device(device: str | torch.device) -> torch.device:
    import torch

    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is unknown: use cpu or cuda") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {str(place)!r}: this torch sees no GPU: use device cpu")
    return place


def _device_memory(device: torch.device) -> int | None:
    """Free bytes on a GPU; None, the system's memory, for anything else."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
