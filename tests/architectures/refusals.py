"""What is refused, with the reason that each message must give; docs/models.md prints the list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_MAMBA_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8}


@dataclass(frozen=True)
class Refusal:
    """A tiny model that must be refused, loaded or as a folder.

    kind: of obstacle, and examples, as the table has them. model, config: classes of transformers.
    says: a part of the message. by_config: the config alone is enough; no weights are read.
    unnamed_says: what is found if the config's first look is left out, by running the model.
    config_says: where the config alone gives another reason.
    """

    name: str
    kind: str
    examples: str
    model: str
    config: str
    fields: Mapping[str, Any]
    says: str
    by_config: bool = False
    unnamed_says: str | None = None
    config_says: str | None = None


REFUSALS = [
    Refusal("mamba", "state space models", "Mamba, Mamba-2, Falcon-Mamba",
            "MambaForCausalLM", "MambaConfig",
            {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
            "their state follows one text token by token and cannot branch into a tree",
            by_config=True, unnamed_says="MambaMixer (backbone.layers.0.mixer) carries something"),
    Refusal("qwen3-next", "linear-attention layers", "Qwen3-Next, Qwen3.5, MiniMax, Kimi Linear",
            "Qwen3NextForCausalLM", "Qwen3NextConfig",
            {**_COMMON, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
             "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
             "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1,
             "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
            "1 of kind linear_attention", by_config=True,
            unnamed_says="Qwen3NextGatedDeltaNet (model.layers.0.linear_attn) carries something"),
    Refusal("falcon-h1", "state space beside attention", "Falcon-H1, Jamba, Bamba, Zamba",
            "FalconH1ForCausalLM", "FalconH1Config", {**_COMMON, **_MAMBA_HEADS},
            "2 of kind hybrid", by_config=True,
            unnamed_says="FalconH1Mixer (model.layers.0.mamba) carries something"),
    Refusal("lfm2", "convolution layers", "LFM2", "Lfm2ForCausalLM", "Lfm2Config",
            {**_COMMON, "layer_types": ["conv", "full_attention"]},
            "a convolution over neighbouring tokens cannot branch into a tree", by_config=True,
            unnamed_says="Lfm2ShortConv (model.layers.0.conv) carries something"),
    Refusal("xlstm", "recurrences that the config does not name", "xLSTM", "xLSTMForCausalLM",
            "xLSTMConfig", {"vocab_size": 64, "hidden_size": 32, "embedding_dim": 32,
                            "num_heads": 2, "num_blocks": 2, "num_hidden_layers": 2,
                            "chunk_size": 16, "pad_token_id": None},
            "xLSTMLayer (backbone.blocks.0.mlstm_layer) carries something from token to token "
            "outside attention"),
    Refusal("t5", "encoder-decoders", "T5, BART, Whisper", "T5ForConditionalGeneration",
            "T5Config", {"vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1,
                         "num_heads": 4},
            "no causal language model", by_config=True, config_says="is an encoder-decoder"),
    Refusal("bert", "encoders, and decoders switched to look both ways",
            "BERT, Gemma 3 with bidirectional attention", "BertLMHeadModel", "BertConfig",
            {**_COMMON, "is_decoder": False},
            "lets tokens see later ones", by_config=True, config_says="is a bert encoder"),
    Refusal("gemma3-both-ways", "encoders, and decoders switched to look both ways", "",
            "Gemma3ForCausalLM", "Gemma3TextConfig",
            {**_COMMON, "head_dim": 8, "use_bidirectional_attention": True},
            "layer 0 lets tokens see later ones"),
    Refusal("gpt2-cross", "decoders that attend to an encoder", "GPT-2 with cross-attention",
            "GPT2LMHeadModel", "GPT2Config", {**_GPT2, "add_cross_attention": True},
            "attends to an encoder (add_cross_attention)", by_config=True),
    Refusal("deepseek-v3", "latent attention (MLA): keys and values of different sizes",
            "DeepSeek V2 and V3, MiniCPM3", "DeepseekV3ForCausalLM", "DeepseekV3Config",
            {**_COMMON, **_LATENT}, "keys of 16 and values of 8 dimensions", by_config=True,
            unnamed_says="its keys have 16 dimensions and its values 8"),
    Refusal("bloom", "ALiBi", "Bloom, MPT, Falcon with `alibi`", "BloomForCausalLM",
            "BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
            "it uses ALiBi", by_config=True, unnamed_says="computes attention by itself"),
    Refusal("mpt", "ALiBi", "", "MptForCausalLM", "MptConfig",
            {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
            "it uses ALiBi", by_config=True),
    Refusal("falcon-alibi", "ALiBi", "", "FalconForCausalLM", "FalconConfig",
            {**_COMMON, "alibi": True}, "it uses ALiBi", by_config=True),
    Refusal("falcon", "attention that does not go through transformers' attention interface",
            "Falcon, GPT-Neo, XGLM, RWKV", "FalconForCausalLM", "FalconConfig", _COMMON,
            "computes attention by itself"),
    Refusal("llama4", "chunked attention", "Llama 4", "Llama4ForCausalLM", "Llama4TextConfig",
            {**_COMMON, "attention_chunk_size": 8, "intermediate_size_mlp": 48,
             "num_local_experts": 2, "head_dim": 8},
            "chunks that tokens may see live only in the mask", by_config=True,
            unnamed_says="hides tokens in its mask alone (a window or chunk of 8 tokens)"),
    Refusal("qwen2-moe-window", "sliding windows that only the mask knows",
            "Qwen2-MoE and Phi-3.5-MoE with a window shorter than their context",
            "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
            {**_COMMON, "use_sliding_window": True, "sliding_window": 24, "num_experts": 2,
             "num_experts_per_tok": 1, "moe_intermediate_size": 16,
             "shared_expert_intermediate_size": 16},
            "layer 0 hides tokens in its mask alone (a window or chunk of 24 tokens)"),
    Refusal("doge", "masks that depend on the tokens", "Doge", "DogeForCausalLM", "DogeConfig",
            _COMMON, "puts something of its own into the attention mask"),
    Refusal("diffllama", "several attentions a layer", "DiffLlama", "DiffLlamaForCausalLM",
            "DiffLlamaConfig", _COMMON, "computes attention 2 times"),
]  # fmt: skip
