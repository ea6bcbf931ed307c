"""Makers of tiny models, in every form that can be loaded."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ModelError

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "h i"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] "
    "+ '\n' }}{% endfor %}"
)


def edit_json(file: Path, **changes: object) -> None:
    """Set keys of a JSON file; a value of None removes the key."""
    value = json.loads(file.read_text())
    value.update(changes)
    file.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def error_line(call: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the ModelError that the call raises, which must be a single line."""
    with pytest.raises(ModelError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def vocabulary() -> list[str]:
    """Special tokens, the byte alphabet and the merged tokens, in id order."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return SPECIALS + alphabet + [merge.replace(" ", "") for merge in MERGES]


def tokenizer() -> Any:
    """A byte-level tokenizer that puts BOS before every text, with a template that does so too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(vocabulary())}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[1]} $A", special_tokens=[(SPECIALS[1], 1)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIALS[1], eos_token=SPECIALS[2]
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    values: dict[str, Any] = {
        "vocab_size": len(vocabulary()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(values | changes))


def llama(**changes: Any) -> Any:
    """A seeded random two-layer Llama in bf16."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(**changes)).to(torch.bfloat16).eval()


def save_llama(folder: Path, **options: Any) -> None:
    llama().save_pretrained(folder, **options)


def write_gguf(path: Path, source: Path, *, add_bos: bool = False, **metadata: Any) -> None:
    """Write the Llama in `source` as llama.cpp's converter does, with fp32 weights."""
    import gguf
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIALS) + [1] * (config.vocab_size - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    _add_tensors(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _add_tensors(writer: Any, model: Any) -> None:
    weights = model.model.state_dict()
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    writer.add_tensor("token_embd.weight", weights["embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["norm.weight"].numpy())
    for layer in range(model.config.num_hidden_layers):
        for theirs, ours in _LAYER_NAMES.items():
            weight = weights[f"layers.{layer}.{theirs}.weight"]
            if ours in heads:
                # llama.cpp pairs neighbouring dimensions in its rotary embedding.
                rows, columns = weight.shape
                weight = weight.view(heads[ours], 2, -1, columns).transpose(1, 2)
                weight = weight.reshape(rows, columns)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", weight.contiguous().numpy())


def write_wheel(folder: Path, member: str, gguf_file: Path) -> Path:
    """A wheel that pip accepts and that holds `gguf_file` as `member`."""
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, member)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel
