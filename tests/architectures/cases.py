"""What is served and what is refused: the lists that the tests run and docs/models.md prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 256
KINDS = ("none", "ngram", "random-tree", "self-tree")
"""Drafts that every architecture is run with: no draft, a real one, and trees of which nothing or
everything is accepted."""

WINDOW = 8
"""Sliding windows of the tiny models; every text of the tests is longer."""

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
_NO_GROUPS = {name: value for name, value in _COMMON.items() if name != "num_key_value_heads"}
_GPT2: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Case:
    """An architecture as a tiny random model.

    name: of the test. shown: in the table, with what it covers. config: a class of transformers.
    fields: of that config, over the common ones. seed: of the weights, so that no two best logits
    are close. since: the first version of transformers in which it works.
    """

    name: str
    shown: str
    covers: str
    config: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    remarks: str = ""
    seed: int = 0
    since: str = "5.17"
    common: Mapping[str, Any] = field(default_factory=lambda: _COMMON)


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_LONGROPE = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
_ALTERNATING = ["sliding_attention", "full_attention"]

CASES = [
    Case("llama", "Llama (also SmolLM2, InternLM 3)", "grouped-query attention", "LlamaConfig"),
    Case("llama-linear", "Llama, rope type `linear`", "texts past the original length",
         "LlamaConfig", _rope("linear", factor=4.0)),
    Case("llama-yarn", "Llama, rope type `yarn`", "texts past the original length", "LlamaConfig",
         _rope("yarn", factor=4.0, original_max_position_embeddings=32),
         "context: factor x original length"),
    Case("llama-llama3", "Llama, rope type `llama3`", "texts past the original length",
         "LlamaConfig", _rope("llama3", **_LLAMA3)),
    Case("llama-dynamic", "Llama, rope type `dynamic`", "the unscaled range", "LlamaConfig",
         _rope("dynamic", factor=4.0), "up to `max_position_embeddings`", seed=1),
    Case("qwen2", "Qwen2, Qwen2.5", "biases in q, k, v; tied head; a window in later layers only",
         "Qwen2Config", {"tie_word_embeddings": True, "use_sliding_window": True,
                         "max_window_layers": 1, "sliding_window": WINDOW}),
    Case("qwen3", "Qwen3", "norms on queries and keys, a head_dim of its own", "Qwen3Config",
         {"head_dim": 24}),
    Case("mistral", "Mistral", "sliding window", "MistralConfig", {"sliding_window": WINDOW}),
    Case("gemma", "Gemma", "one KV head, wide heads, scaled embeddings", "GemmaConfig",
         {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    Case("gemma2", "Gemma 2", "soft-capped scores and logits, local and global layers",
         "Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
                          "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0,
                          "attn_implementation": "eager"}),
    Case("gemma3", "Gemma 3 (text)", "local and global layers with ropes of their own",
         "Gemma3TextConfig", {
             "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
             "layer_types": _ALTERNATING,
             "rope_parameters": {
                 "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                 "full_attention": {
                     "rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0,
                 },
             }}),
    Case("phi3", "Phi-3", "fused q, k, v; sliding window", "Phi3Config",
         {"sliding_window": WINDOW}),
    Case("phi3-longrope", "Phi-3, Phi-4-mini, rope type `longrope`", "short factors", "Phi3Config",
         {**_rope("longrope", **_LONGROPE), "original_max_position_embeddings": 96},
         "up to `original_max_position_embeddings`"),
    Case("gpt2", "GPT-2", "learned positions, Conv1D layers, tied head", "GPT2Config",
         common=_GPT2),
    Case("gpt-neox", "GPT-NeoX, Pythia", "parallel residual, a quarter of each head rotated",
         "GPTNeoXConfig", _rope("default", partial_rotary_factor=0.25), common=_NO_GROUPS),
    Case("stablelm", "StableLM", "a quarter of each head rotated, serial residual",
         "StableLmConfig", {"use_qkv_bias": True}, seed=2),
    Case("stablelm-parallel", "StableLM 2 12B", "parallel residual, norms per head",
         "StableLmConfig", {"use_parallel_residual": True, "qk_layernorm": True}),
    Case("olmo2", "OLMo 2", "norms after the blocks, on queries and keys", "Olmo2Config",
         seed=1),
    Case("granite", "Granite 3", "multipliers of embeddings, scores, residuals and logits",
         "GraniteConfig", {"embedding_multiplier": 2.0, "attention_multiplier": 0.2,
                           "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    Case("cohere", "Cohere Command R", "interleaved rotary pairs, scaled logits, norms per head",
         "CohereConfig", {"logit_scale": 0.5, "use_qk_norm": True, "tie_word_embeddings": True}),
    Case("cohere2", "Cohere Command R7B", "local layers with rotary, global ones without",
         "Cohere2Config", {"logit_scale": 0.5, "sliding_window": WINDOW,
                           "layer_types": _ALTERNATING, "tie_word_embeddings": True}),
    Case("mixtral", "Mixtral", "mixture of experts", "MixtralConfig", _EXPERTS, seed=1),
    Case("qwen3-moe", "Qwen3-MoE", "mixture of experts, norms on queries and keys",
         "Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
                            "moe_intermediate_size": 32}, seed=1),
    Case("gpt-oss", "GPT-OSS", "attention sinks, local and global layers, experts with biases",
         "GptOssConfig", {**_EXPERTS, "head_dim": 16, "sliding_window": WINDOW,
                          **_rope("yarn", factor=4.0, original_max_position_embeddings=32)},
         seed=1),
    Case("gemma3-wrapper", "Gemma 3 (multi-modal checkpoint)", "its text part", "Gemma3Config",
         {"text_config": {**_COMMON, "head_dim": 16, "query_pre_attn_scalar": 16,
                          "sliding_window": WINDOW, "layer_types": _ALTERNATING,
                          "pad_token_id": 0},
          "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                            "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
          "mm_tokens_per_image": 4, "image_token_index": 255, "boi_token_index": 254,
          "eoi_token_index": 253, "initializer_range": 0.3, "tie_word_embeddings": False},
         "text prompts only", common={}, seed=1),
    Case("gemma4", "Gemma 4 (text)", "local and global layers with head sizes of their own",
         "Gemma4TextConfig", {
             "head_dim": 16, "global_head_dim": 24, "sliding_window": WINDOW,
             "layer_types": _ALTERNATING, "hidden_size_per_layer_input": 8,
             "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 0,
         }),
    Case("ministral", "Ministral", "local and global layers", "MinistralConfig",
         {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    Case("ministral3", "Ministral 3", "scores scaled by position, yarn", "Ministral3Config",
         {"head_dim": 16,
          **_rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32.0,
                  beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)}),
    Case("olmo", "OLMo", "norms without weights, clipped q, k, v", "OlmoConfig",
         {"clip_qkv": 2.0}),
    Case("olmo3", "OLMo 3", "local and global layers", "Olmo3Config",
         {"sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    Case("olmoe", "OLMoE", "mixture of experts, norms on queries and keys", "OlmoeConfig",
         {"num_experts": 4, "num_experts_per_tok": 2}),
    Case("qwen2-moe", "Qwen2-MoE", "mixture of experts with a shared one", "Qwen2MoeConfig",
         {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "shared_expert_intermediate_size": 48}),
    Case("granite-moe", "Granite MoE", "mixture of experts, multipliers", "GraniteMoeConfig",
         {**_EXPERTS, "attention_multiplier": 0.2, "residual_multiplier": 0.7}, seed=1),
    Case("phi", "Phi-1, Phi-2", "parallel residual, partial rotary, biases", "PhiConfig",
         _rope("default", partial_rotary_factor=0.5)),
    Case("starcoder2", "StarCoder 2", "sliding window, biases", "Starcoder2Config",
         {"sliding_window": WINDOW}),
    Case("gpt-bigcode", "StarCoder (GPT-BigCode)", "learned positions, one KV head",
         "GPTBigCodeConfig", common=_GPT2),
    Case("gpt-j", "GPT-J", "interleaved rotary on a part of each head", "GPTJConfig",
         {"rotary_dim": 8, "tie_word_embeddings": False},
         "with transformers 5.24 or newer", since="5.24", common=_GPT2),
    Case("opt", "OPT", "learned positions with an offset", "OPTConfig",
         {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "init_std": 0.3,
          "pad_token_id": 1}, common=_NO_GROUPS, seed=1),
    Case("smollm3", "SmolLM3", "layers without rotary", "SmolLM3Config",
         {"no_rope_layers": [1, 0]}),
    Case("exaone4", "EXAONE 4", "norms after the blocks; global layers without rotary",
         "Exaone4Config", {"sliding_window": WINDOW, "layer_types": _ALTERNATING}, seed=1),
    Case("glm", "GLM-4 9B", "interleaved rotary on half of each head", "GlmConfig",
         {"head_dim": 16, **_rope("default", partial_rotary_factor=0.5)}),
    Case("glm4", "GLM-4 0414", "norms before and after the blocks", "Glm4Config",
         {"head_dim": 16, **_rope("default", partial_rotary_factor=0.5)}, seed=1),
    Case("nemotron", "Nemotron 3/4", "norms around one, squared ReLU", "NemotronConfig",
         _rope("default", partial_rotary_factor=0.5), seed=1),
    Case("ernie4-5", "ERNIE 4.5", "interleaved rotary", "Ernie4_5Config", {"head_dim": 16}),
    Case("hunyuan", "Hunyuan (dense)", "norms on rotated queries and keys",
         "HunYuanDenseV1Config", {"head_dim": 16}),
    Case("seed-oss", "Seed-OSS", "biases in q, k, v only", "SeedOssConfig", {"head_dim": 16},
         seed=1),
    Case("arcee", "Arcee AFM", "squared ReLU, yarn", "ArceeConfig",
         _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    Case("apertus", "Apertus", "learned activations, norms on queries and keys", "ApertusConfig",
         _rope("llama3", **_LLAMA3)),
    Case("helium", "Helium", "interleaved rotary", "HeliumConfig", {"head_dim": 16}),
]  # fmt: skip
