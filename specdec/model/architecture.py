"""Which architectures can be served at all, judged by the config before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.model.folder import CONFIG, check_config, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_ATTENTION_KINDS = frozenset({"attention", "full_attention", "sliding_attention"})

_STATE = (
    "their state follows one text token by token and cannot branch into a tree (state space and "
    "linear-attention layers are not served)"
)
_WHY = {
    "linear_attention": _STATE,
    "mamba": _STATE,
    "recurrent": _STATE,
    "hybrid": _STATE,
    "hybrid_sliding": _STATE,
    "conv": "a convolution over neighbouring tokens cannot branch into a tree",
    "chunked_attention": (
        "the chunks that tokens may see live only in the mask, and tree attention takes none"
    ),
}
_WHY_OTHER = "tree attention computes full and sliding-window attention only"

_ALIBI_TYPES = frozenset({"bloom"})
"""Models with ALiBi whose config has no field for it."""


def load_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config in `folder`, of an architecture that has a causal language model.

    Raises:
        ModelError: an encoder-decoder, an encoder, a model type that this transformers does not
            know, one whose code comes with the checkpoint and is not trusted, or one whose layers
            cannot score token trees.
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
    try:
        check_servable(config)
    except ModelError as error:
        raise ModelError(f"{folder} ({model_type}) cannot be served: {error}") from error
    return config


def check_servable(config: PreTrainedConfig) -> None:
    """Refuse what the config alone shows to be beyond tree attention.

    Only a first look, which spares reading weights: what it lets through is run and compared when
    an engine is made. Raises ModelError with the reason; the caller says which model it is.
    """
    text = config.get_text_config(decoder=True)
    kinds = list(
        getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    )
    others = sorted(set(kinds) - _ATTENTION_KINDS)
    if others:
        layers = ", ".join(f"{kinds.count(kind)} of kind {kind}" for kind in others)
        why = next((_WHY[kind] for kind in others if kind in _WHY), _WHY_OTHER)
        raise ModelError(f"of its {len(kinds)} layers it has {layers}: {why}")
    if _has_alibi(text):
        raise ModelError(
            "it uses ALiBi, which adds a bias by distance to attention scores; tree attention has "
            "no such bias"
        )
    key_dim, value_dim = _latent_dims(text)
    if key_dim != value_dim:
        raise ModelError(
            f"its latent attention has keys of {key_dim} and values of {value_dim} dimensions, and "
            "a page holds both in one size"
        )
    if getattr(text, "add_cross_attention", False):
        raise ModelError("it attends to an encoder (add_cross_attention), and there is none here")


def _has_alibi(config: PreTrainedConfig) -> bool:
    holder = getattr(config, "attn_config", None) or config
    return config.model_type in _ALIBI_TYPES or bool(getattr(holder, "alibi", False))


def _latent_dims(config: PreTrainedConfig) -> tuple[int, int]:
    """Dimensions of a key and of a value in multi-head latent attention; (0, 0) without it."""
    if getattr(config, "kv_lora_rank", None) is None:
        return 0, 0
    key = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)
    return int(key), int(getattr(config, "v_head_dim", None) or key)


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
