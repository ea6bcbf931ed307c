"""GGUF files of tiny random models, written as llama.cpp's converter writes them.

The forms are those of conversion/*.py in https://github.com/ggml-org/llama.cpp: names from the gguf
package's map, heads of llama and granite permuted, Gemma's norms plus one, GPT-2's matrices
transposed, GPT-NeoX's queries, keys and values regrouped, experts stacked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.model import tiny

VOCAB_SIZE = len(tiny.vocabulary())

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-untied": ("LlamaConfig", {"head_dim": 32, "rms_norm_eps": 3e-5}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2moe": ("Qwen2MoeConfig", {**SPARSE, "shared_expert_intermediate_size": 48}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3moe": ("Qwen3MoeConfig", {**SPARSE, "head_dim": 24, "norm_topk_prob": True}),
    "gemma": ("GemmaConfig", {"head_dim": 24}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 8, "original_max_position_embeddings": 128}),
    "gpt2": ("GPT2Config", {}),
    "gptneox": ("GPTNeoXConfig", {"rotary_pct": 0.5, "use_parallel_residual": False}),
    "stablelm": (
        "StableLmConfig",
        {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "use_parallel_residual": True},
    ),
    "stablelm-norms": ("StableLmConfig", {"partial_rotary_factor": 0.25, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2Config", {"rope_theta": 999999.0, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2Config", {}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "command-r": ("CohereConfig", {"logit_scale": 0.25, "use_qk_norm": True}),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
                "rope_theta": 150000.0,
            },
        },
    ),
}

ARCHITECTURES = {
    "llama-untied": "llama",
    "llama-biases": "llama",
    "mixtral": "llama",
    "stablelm-norms": "stablelm",
}


def random_model(kind: str, **changes: Any) -> Any:
    """A seeded random model in fp32 with values of bf16; no norm is one, no bias zero."""
    import transformers

    class_name, fields = CONFIGS[kind]
    fields = COMMON | fields | changes
    if kind == "gpt2":
        fields |= {"n_positions": fields.pop("max_position_embeddings"), "n_inner": 96}
        del fields["num_key_value_heads"], fields["intermediate_size"]
    if kind == "gptneox":
        del fields["num_key_value_heads"]
    config = getattr(transformers, class_name)(**fields)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "norm" in name or name.endswith(("_bias", "sinks")):
            parameter.data.normal_(0.0, 0.2, generator=generator)
            parameter.data += float("norm" in name and not kind.startswith("gemma"))
        # Not model.to: that would round the rotary buffers too.
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return model.eval().requires_grad_(False)


Encode = Callable[[str, np.ndarray[Any, Any]], tuple[np.ndarray[Any, Any], Any]]


def as_f32(name: str, values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
    return values.astype(np.float32), gguf.GGMLQuantizationType.F32


def write_model(
    path: Path,
    model: Any,
    kind: str,
    *,
    encode: Encode = as_f32,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> None:
    """Write `model`, which is of `kind`, to a GGUF file.

    encode: how a tensor is stored, by its GGUF name. tokenizer: adds its keys; by default those of
    tiny.tokenizer(). extra: adds anything else.
    """
    architecture = ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(path, architecture)
    _add_parameters(writer, model.config, architecture)
    (tokenizer or add_tiny_tokenizer)(writer)
    for name, tensor in gguf_tensors(model, architecture):
        data, kind_of_data = encode(name, np.ascontiguousarray(tensor.numpy()))
        writer.add_tensor(name, data, raw_dtype=kind_of_data)
    if extra is not None:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tiny_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = tiny.vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(tiny.SPECIALS) + [1] * (len(tokens) - len(tiny.SPECIALS)))
    writer.add_token_merges(tiny.MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_parameters(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    """The keys that llama.cpp's converter writes for an architecture."""
    rope = getattr(config, "rope_parameters", None) or {}
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
    width = config.n_inner if architecture == "gpt2" else config.intermediate_size
    writer.add_feed_forward_length(width)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if "rope_theta" in local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or architecture in ("llama", "phi3"):
        part = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(part * head_dim))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if head_dim * heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for field in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if hasattr(config, field):
            writer.add_layer_norm_eps(getattr(config, field))
    _add_special_parameters(writer, config, architecture)


def _add_special_parameters(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", None))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in ("gptneox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if architecture == "command-r":
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def gguf_tensors(model: Any, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a GGUF file, in fp32 and torch's order of dimensions."""
    config = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    head_norms: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.data.float()
        if found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\w+)", name):
            yield from _expert_tensors(f"blk.{found[1]}", found[2], weight, architecture)
            continue
        if found := re.fullmatch(r"(.*_layernorm)\.norms\.\d+\.weight", name):
            head_norms.setdefault(found[1], []).append(weight)
            continue
        base, suffix = name, "weight"
        if name.endswith((".weight", ".bias")):
            base, _, suffix = name.rpartition(".")
        yield f"{names.get_name(base)}.{suffix}", _stored(weight, name, architecture, config)
    for base, parts in head_norms.items():
        yield f"{names.get_name(base)}.weight", torch.stack(parts)


def _stored(weight: torch.Tensor, name: str, architecture: str, config: Any) -> torch.Tensor:
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if architecture in ("llama", "granite") and (".q_proj." in name or ".k_proj." in name):
        count = heads if ".q_proj." in name else kv_heads
        split = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
        return split.swapaxes(1, 2).reshape(weight.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    if architecture == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight$", name):
        return weight.T
    if architecture == "gptneox" and ".query_key_value." in name:
        split = weight.reshape(heads, 3, config.hidden_size // heads, *weight.shape[1:])
        return torch.cat([split[:, part].flatten(0, 1) for part in range(3)])
    return weight


def _expert_tensors(
    block: str, part: str, weight: torch.Tensor, architecture: str
) -> Iterator[tuple[str, torch.Tensor]]:
    suffix = "bias" if part.endswith("_bias") else "weight"
    if part.startswith("down"):
        turned = architecture == "gpt-oss" and suffix == "weight"
        yield f"{block}.ffn_down_exps.{suffix}", weight.transpose(-1, -2) if turned else weight
        return
    if architecture == "gpt-oss":
        weight = weight.transpose(-1, -2) if suffix == "weight" else weight
        gate, up = weight[:, ::2], weight[:, 1::2]
    else:
        gate, up = weight.chunk(2, dim=1)
    yield f"{block}.ffn_gate_exps.{suffix}", gate
    yield f"{block}.ffn_up_exps.{suffix}", up
