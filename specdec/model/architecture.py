"""Which architectures can be served at all, judged by the config before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.model.folder import CONFIG, check_config, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def load_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config in `folder`, of an architecture that has a causal language model.

    Raises:
        ModelError: an encoder-decoder, an encoder, a model type that this transformers does not
            know, or one whose code comes with the checkpoint and is not trusted.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = read_json(folder / CONFIG)
    check_config(raw, folder)
    model_type = str(raw.get("model_type", ""))
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        if raw.get("auto_map"):
            raise ModelError(
                f"{folder} ({model_type}) brings its own code: if you trust it, set "
                "trust_remote_code (--trust-remote-code)"
            )
        raise ModelError(
            f"{folder}: model type {model_type!r} is unknown to transformers "
            f"{transformers.__version__}: upgrade transformers or choose another model"
        )
    try:
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise ModelError(
            f"{folder / CONFIG} is not a valid {model_type} config ({error}): download it again or "
            "correct it"
        ) from error
    _check_causal(config, raw, folder)
    return config


def _check_causal(config: PreTrainedConfig, raw: dict[str, Any], folder: Path) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    if "AutoModelForCausalLM" in (raw.get("auto_map") or {}):
        return
    model_type = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{folder}: {model_type} has no causal language model in transformers: only "
            "decoder-only language models are served"
        )
    # BERT and its kin have a causal class too, but their usual checkpoints look both ways.
    causal = {
        name
        for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ([value] if isinstance(value, str) else value)
    }
    both_ways = model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if both_ways and not causal.intersection(raw.get("architectures") or []):
        raise ModelError(
            f"{folder} is a {model_type} encoder: only decoder-only language models are served"
        )
