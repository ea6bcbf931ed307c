"""LoRA adapters (PEFT): checked against the model they were made for, merged into its weights."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.model.folder import CONFIG, read_json, tensor_names
from specdec.model.progress import quiet_transformers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""Before the name of a module of the base, in the file and in PEFT's wrapped model."""

_LORA_NAME = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?"
)

# Settings under which the adapter cannot be folded into the base's weights, or not alone.
_NOT_MERGED = {
    "alora_invocation_tokens": "it is active after certain tokens only",
    "layer_replication": "it changes the number of layers",
    "target_parameters": "it adapts parameters that are no layers",
    "trainable_token_indices": "it adapts single rows of the embedding",
}


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter on disk.

    Attributes:
        folder: where it lies.
        base: what its config calls the model it was made for: a path, a hub id or a name; "" if it
            does not say.
        revision: of the base on the hub.
    """

    folder: Path
    base: str
    revision: str

    @property
    def num_bytes(self) -> int:
        return (self.folder / ADAPTER_WEIGHTS).stat().st_size


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """The adapter in `folder`, with its weights there and of a kind that can be merged.

    Raises:
        ModelError: names the file that is missing or corrupt, or the kind of adapter.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{folder} is no adapter: it has no {ADAPTER_CONFIG}; give a folder that peft's "
            "save_pretrained wrote"
        )
    config = read_json(folder / ADAPTER_CONFIG)
    _check_kind(config, folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise ModelError(
            f"{folder} has its weights as adapter_model.bin only, and pickles are not loaded: load "
            "it with peft and save it again"
            if pickled
            else f"{folder} has no {ADAPTER_WEIGHTS}: download it into the folder"
        )
    tensor_names(folder / ADAPTER_WEIGHTS)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    return Adapter(folder.absolute(), str(base or ""), str(revision or "main"))


def _check_kind(config: dict[str, Any], folder: Path) -> None:
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "LORA":
        raise ModelError(
            f"{folder} is an adapter of type {kind}: only LORA adapters are merged; with another "
            "type, merge it yourself where peft can, and give the merged model"
        )
    if task not in (None, "CAUSAL_LM"):
        raise ModelError(f"{folder} is an adapter for {task}, not for a causal language model")
    for key, reason in _NOT_MERGED.items():
        if config.get(key):
            raise ModelError(f"{folder} cannot be merged: {key} is set, so {reason}")


def check_mergeable(adapter: Adapter, config: PreTrainedConfig, base: Path) -> None:
    """Whether an adapter can be merged at all, known before the base is loaded.

    Raises:
        ModelError: peft is not installed or too old, or the base is quantised.
    """
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"the adapter {adapter.folder} needs peft ({error}): "
            "pip install -U 'specdec-server[lora]'"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{base} is quantised, so {adapter.folder} cannot be merged into it: give the base in "
            "bf16, fp16 or fp32"
        )


def merge_adapter(model: PreTrainedModel, adapter: Adapter, base: Path) -> PreTrainedModel:
    """The model with an adapter merged into its weights, which are changed in place.

    Args:
        model: the base, in memory only for this.
        adapter: read before.
        base: the base's folder, for messages.

    Raises:
        ModelError: the adapter was made for another model (names a module and both shapes), or a
            merged weight is not finite.
    """
    import peft
    import torch

    adapted = _check_fits(model, adapter, base)
    try:
        # What peft warns of is checked here, and an error.
        with quiet_transformers(), warnings.catch_warnings(action="ignore"):
            wrapped = peft.PeftModel.from_pretrained(
                model, str(adapter.folder), torch_device=str(model.device)
            )
            layers = {
                name.removeprefix(_PREFIX)
                for name, module in wrapped.named_modules()
                if isinstance(module, peft.tuners.lora.LoraLayer)
            }
            if layers != adapted:
                raise ModelError(
                    f"{adapter.folder / ADAPTER_CONFIG} names other layers than "
                    f"{ADAPTER_WEIGHTS} holds, {min(layers ^ adapted)} first: download both again"
                )
            # Not safe_merge: that rounds what is added to the weights' dtype before it adds.
            merged: PreTrainedModel = wrapped.merge_and_unload()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"cannot merge {adapter.folder} into {base}: {error}") from error
    for name in adapted:
        weight = merged.get_parameter(f"{name}.weight")
        if not torch.isfinite(weight).all():
            raise ModelError(
                f"{adapter.folder} gives {name} weights that are not finite: the adapter is damaged"
            )
    return merged


def _check_fits(model: PreTrainedModel, adapter: Adapter, base: Path) -> set[str]:
    """The layers that the adapter's file has LoRA weights for, each as the base has it."""
    from safetensors import safe_open

    layers = set()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    tied = _tied_ends(model)
    made_for = f"give the model it was made for ({adapter.base or 'its config does not say which'})"
    with safe_open(adapter.folder / ADAPTER_WEIGHTS, framework="np") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a dictionary
            shape = tuple(tensors.get_slice(key).get_shape())
            name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
            found = _LORA_NAME.fullmatch(name)
            if found is None:
                module = name.rpartition(".")[0]
                fitting = [tuple(parameters[name].shape)] if name in parameters else []
            else:
                module = found[1]
                layers.add(module)
                fitting = _lora_shapes(modules.get(module), found[2], shape)
            if module in tied:
                raise ModelError(
                    f"{adapter.folder} adapts {module}, which {base} uses for embedding and head:"
                    " merged it would change both; untie them first (tie_word_embeddings)"
                )
            if not fitting:
                raise ModelError(
                    f"{adapter.folder} was made for another model: it adapts {module}, which {base}"
                    f" does not have as a layer; {made_for}"
                )
            if shape not in fitting:
                raise ModelError(
                    f"{adapter.folder} was made for another model: its {key} has the shape {shape},"
                    f" which {module} of {base} does not take ({fitting[0]} would fit); {made_for}"
                )
    if not layers:
        raise ModelError(f"{adapter.folder / ADAPTER_WEIGHTS} holds no LoRA weights")
    return layers


def _lora_shapes(
    module: torch.nn.Module | None, part: str, shape: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Shapes that a part of an adapter of this rank may have on a layer; none if it is no layer.

    A embeds into `rank` dimensions and B leads out of them; DoRA has a length for each output.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        inputs, outputs = module.in_features, module.out_features
    elif isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
    elif isinstance(module, nn.Embedding):
        inputs, outputs = module.num_embeddings, module.embedding_dim
    else:
        return []
    if part == "lora_magnitude_vector":
        return [(outputs,), (1, outputs), (outputs, 1)]
    if not shape:
        return []
    return [(shape[0], inputs)] if part.endswith("A") else [(outputs, shape[-1])]


def _tied_ends(model: PreTrainedModel) -> set[str]:
    """Names of embedding and head where one matrix serves as both."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight:
        return set()
    return {name for name, module in model.named_modules() if module is head or module is embedding}
