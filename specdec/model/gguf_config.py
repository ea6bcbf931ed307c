"""From a GGUF file's metadata to a transformers config, one function an architecture.

A key that no function asks for is refused rather than dropped, and what the config class would fill
in from some other checkpoint (window, soft-cap, head size, special tokens) is always set.
What the keys mean: llama.cpp's converter, https://github.com/ggml-org/llama.cpp (conversion/).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelError
from specdec.model.gguf_header import GgufHeader
from specdec.model.gguf_keys import GgufKeys
from specdec.model.gguf_rope import ReadTensor, rope_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Fields = dict[str, Any]

_MANY_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose attention scale comes from the hidden size; the file does not
say so, and llama.cpp too goes by this number."""


def gguf_config(header: GgufHeader, read: ReadTensor) -> PreTrainedConfig:
    """The config of the model in a GGUF file.

    Args:
        header: the file's header.
        read: gives a tensor of the file by name.

    Raises:
        ModelError: an architecture, or a setting of it, that is not read; names it.
    """
    import transformers

    if header.architecture not in _BUILDERS:
        raise ModelError(
            f"{header.path}: GGUF architecture {header.architecture!r} is not read; those that are:"
            f" {', '.join(sorted(_BUILDERS))}; use the model's safetensors checkpoint instead"
        )
    if header.metadata.get("general.type", "model") != "model":
        raise ModelError(
            f"{header.path} is no model (general.type {header.metadata['general.type']!r}): "
            "give the GGUF file of the model"
        )
    keys = GgufKeys(header)
    class_name, fields = _BUILDERS[header.architecture](keys, read)
    if keys.get("attention.causal", True) is not True:
        raise keys.refusal("attention.causal", False, "only causal language models are served")
    keys.ignore("vocab_size", "tensor_data_layout")
    keys.check_all_read()
    try:
        config: PreTrainedConfig = getattr(transformers, class_name)(
            **fields, **_special_tokens(header)
        )
    except Exception as error:
        raise ModelError(
            f"{header.path} does not describe a {class_name} ({error}): use the model's "
            "safetensors checkpoint instead"
        ) from error
    return config


def _special_tokens(header: GgufHeader) -> Fields:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in keys.items()
    }


def _decoder(
    keys: GgufKeys, read: ReadTensor, *, partial: bool = False, experts: bool = False
) -> Fields:
    """What all architectures have; `head_dim` is what the file's tensors have, stated or not."""
    hidden, heads = keys.need("embedding_length"), keys.need("attention.head_count")
    head_dim = keys.get("attention.key_length", hidden // heads)
    value_dim = keys.get("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise keys.refusal("attention.value_length", value_dim, f"keys have {head_dim} dimensions")
    if not experts and keys.get("expert_count", 0):
        raise keys.refusal("expert_count", keys.get("expert_count"), "experts are not expected")
    if not experts:
        keys.ignore("expert_used_count")
    if "token_embd.weight" not in keys.tensors:
        raise ModelError(f"{keys.path} has no token embedding: give the GGUF file of the model")
    return {
        "vocab_size": keys.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.get("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.need("context_length"),
        "rope_parameters": rope_parameters(keys, read, head_dim, partial=partial),
        # llama.cpp leaves the output matrix out where it is the embedding.
        "tie_word_embeddings": "output.weight" not in keys.tensors,
    }


def _rms(keys: GgufKeys) -> Fields:
    return {"rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon")}


def _layer_norm(keys: GgufKeys, field: str = "layer_norm_eps") -> Fields:
    return {field: keys.need("attention.layer_norm_epsilon")}


def _biases(keys: GgufKeys) -> Fields:
    tensors = keys.tensors
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _without_head_dim(keys: GgufKeys, fields: Fields) -> Fields:
    """For classes that take no head size of their own."""
    head_dim = fields.pop("head_dim")
    if head_dim != fields["hidden_size"] // fields["num_attention_heads"]:
        raise keys.refusal("attention.key_length", head_dim, "it is not hidden size over heads")
    return fields


def _llama(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _decoder(keys, read, experts=True) | _rms(keys)
    experts, used = keys.get("expert_count", 0), keys.get("expert_used_count", 0)
    if not experts:
        return "LlamaConfig", fields | _biases(keys)
    routing = {"num_local_experts": experts, "num_experts_per_tok": used}
    return "MixtralConfig", fields | routing | {"sliding_window": None}


def _qwen2(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    return "Qwen2Config", _without_head_dim(keys, _decoder(keys, read)) | _rms(keys)


def _qwen3(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    bias = {"attention_bias": "blk.0.attn_q.bias" in keys.tensors}
    return "Qwen3Config", _decoder(keys, read) | _rms(keys) | bias


def _experts(keys: GgufKeys) -> Fields:
    return {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
    }


def _qwen2moe(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _without_head_dim(keys, _decoder(keys, read, experts=True)) | _rms(keys)
    shared = keys.need("expert_shared_feed_forward_length")
    fields |= _experts(keys) | {"shared_expert_intermediate_size": shared}
    return "Qwen2MoeConfig", fields | {"norm_topk_prob": False}


def _qwen3moe(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _decoder(keys, read, experts=True) | _rms(keys) | _experts(keys)
    return "Qwen3MoeConfig", fields | {"norm_topk_prob": True}


def _gemma(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    return "GemmaConfig", _decoder(keys, read) | _rms(keys)


def _query_scale(keys: GgufKeys, fields: Fields) -> Fields:
    by_hidden = fields["num_hidden_layers"] == _MANY_LAYERS[keys.architecture]
    over_heads = fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": over_heads if by_hidden else fields["head_dim"]}


def _gemma2(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _decoder(keys, read) | _rms(keys)
    fields |= _query_scale(keys, fields) | {
        "sliding_window": keys.need("attention.sliding_window"),
        "attn_logit_softcapping": keys.need("attn_logit_softcapping"),
        "final_logit_softcapping": keys.need("final_logit_softcapping"),
    }
    return "Gemma2Config", fields


def _gemma3(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _decoder(keys, read) | _rms(keys)
    local = keys.get("rope.freq_base_swa", 10000.0)
    fields["rope_parameters"] = {
        "full_attention": fields["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    window = keys.get("attention.sliding_window")
    fields |= _query_scale(keys, fields) | {
        "sliding_window": window,
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }
    pattern = keys.raw("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        names = {True: "sliding_attention", False: "full_attention"}
        fields["layer_types"] = [names[bool(sliding)] for sliding in pattern]
    elif window is None:
        fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
    else:
        fields["sliding_window_pattern"] = pattern or 6
    return "Gemma3TextConfig", fields


def _phi3(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _without_head_dim(keys, _decoder(keys, read, partial=True)) | _rms(keys)
    original = fields["rope_parameters"].get("original_max_position_embeddings")
    # 0 says that there is no window (Phi-4), as does a missing key.
    fields["sliding_window"] = keys.get("attention.sliding_window") or None
    fields["original_max_position_embeddings"] = original or fields["max_position_embeddings"]
    return "Phi3Config", fields


def _gpt2(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _without_head_dim(keys, _decoder(keys, read))
    return "GPT2Config", _layer_norm(keys, "layer_norm_epsilon") | {
        "vocab_size": fields["vocab_size"],
        "n_positions": fields["max_position_embeddings"],
        "n_embd": fields["hidden_size"],
        "n_layer": fields["num_hidden_layers"],
        "n_head": fields["num_attention_heads"],
        "n_inner": fields["intermediate_size"],
        "tie_word_embeddings": fields["tie_word_embeddings"],
    }


def _gptneox(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _without_head_dim(keys, _decoder(keys, read, partial=True)) | _layer_norm(keys)
    del fields["num_key_value_heads"]
    return "GPTNeoXConfig", fields | {
        "use_parallel_residual": keys.get("use_parallel_residual", True)
    }


def _stablelm(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _without_head_dim(keys, _decoder(keys, read, partial=True)) | _layer_norm(keys)
    keys.ignore("use_parallel_residual")  # the tensors say it, also in files that get it wrong
    return "StableLmConfig", fields | {
        "use_qkv_bias": "blk.0.attn_q.bias" in keys.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in keys.tensors,
    }


def _starcoder2(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _without_head_dim(keys, _decoder(keys, read)) | _layer_norm(keys, "norm_epsilon")
    bias = {"use_bias": "blk.0.attn_q.bias" in keys.tensors, "sliding_window": None}
    return "Starcoder2Config", fields | bias


def _olmo2(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    bias = {"attention_bias": "blk.0.attn_q.bias" in keys.tensors}
    return "Olmo2Config", _without_head_dim(keys, _decoder(keys, read)) | _rms(keys) | bias


def _granite(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _without_head_dim(keys, _decoder(keys, read)) | _rms(keys) | _biases(keys)
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    return "GraniteConfig", fields | {
        "attention_multiplier": keys.get("attention.scale", head_dim**-0.5),
        "embedding_multiplier": keys.get("embedding_scale", 1.0),
        "residual_multiplier": keys.get("residual_scale", 1.0),
        "logits_scaling": keys.get("logit_scale", 1.0),
    }


def _command_r(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _without_head_dim(keys, _decoder(keys, read)) | _layer_norm(keys)
    return "CohereConfig", fields | {
        "logit_scale": keys.need("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.tensors,
        "attention_bias": "blk.0.attn_q.bias" in keys.tensors,
    }


def _gpt_oss(keys: GgufKeys, read: ReadTensor) -> tuple[str, Fields]:
    fields = _decoder(keys, read, experts=True) | _rms(keys)
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # as in all checkpoints of this architecture
    return "GptOssConfig", fields | {
        "intermediate_size": keys.need("expert_feed_forward_length"),
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "sliding_window": keys.need("attention.sliding_window"),
    }


_BUILDERS: dict[str, Callable[[GgufKeys, ReadTensor], tuple[str, Fields]]] = {
    "command-r": _command_r,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "granite": _granite,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
