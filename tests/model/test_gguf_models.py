"""GGUF files of many architectures and quantisations: what comes out is what was put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from specdec import LLM, SamplingParams
from specdec.model.gguf import convert_gguf
from specdec.request import FinishReason
from specdec.testing import reference_generate
from tests.model import gguf_files, tiny
from tests.model.gguf_files import random_model, write_model

pytestmark = pytest.mark.usefixtures("cache")

# Longer than every window and every original context of the tiny configs.
IDS = torch.randint(0, gguf_files.VOCAB_SIZE, (1, 48), generator=torch.Generator().manual_seed(1))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def assert_same_model(got: Any, want: Any) -> None:
    expected = want.state_dict()
    assert got.state_dict().keys() == expected.keys()
    for name, weight in got.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert torch.equal(got(IDS).logits, want(IDS).logits)


@pytest.mark.parametrize("kind", gguf_files.CONFIGS)
def test_architecture(kind: str, tmp_path: Path) -> None:
    want = random_model(kind)
    write_model(tmp_path / "model.gguf", want, kind)
    got = load(convert_gguf(tmp_path / "model.gguf"))
    assert_same_model(got, want)
    assert got.config.tie_word_embeddings == want.config.tie_word_embeddings
    assert (got.config.bos_token_id, got.config.eos_token_id) == (1, 2)
    assert got.config.pad_token_id is None


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_rope_scaling(rope: str, tmp_path: Path) -> None:
    parameters = {"rope_theta": 20000.0, **ROPES[rope]}
    want = random_model("llama", rope_parameters=parameters)

    def add_factors(writer: GGUFWriter) -> None:
        if rope == "llama3":
            plain = 1 / 20000.0 ** (torch.arange(0, 16, 2).float() / 16)
            factors = plain / want.model.rotary_emb.inv_freq
            writer.add_tensor("rope_freqs.weight", factors.numpy())

    write_model(tmp_path / "model.gguf", want, "llama", extra=add_factors)
    got = load(convert_gguf(tmp_path / "model.gguf"))
    assert_same_model(got, want)
    assert torch.equal(got.model.rotary_emb.inv_freq, want.model.rotary_emb.inv_freq)
    plain = random_model("llama", rope_parameters={"rope_theta": 20000.0, "rope_type": "default"})
    assert not torch.equal(plain.model.rotary_emb.inv_freq, want.model.rotary_emb.inv_freq)


def test_long_rope(tmp_path: Path) -> None:
    short, long = np.linspace(1, 1.4, 8), np.linspace(1, 6, 8)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [float(np.float32(value)) for value in short],
        "long_factor": [float(np.float32(value)) for value in long],
        "original_max_position_embeddings": 32,
        "attention_factor": 1.25,
    }
    want = random_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)

    def add_factors(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_attn_factors(1.25)
        writer.add_tensor("rope_factors_short.weight", short.astype(np.float32))
        writer.add_tensor("rope_factors_long.weight", long.astype(np.float32))

    write_model(tmp_path / "model.gguf", want, "phi3", extra=add_factors)
    assert_same_model(load(convert_gguf(tmp_path / "model.gguf")), want)


def wide_model() -> Any:
    """A one-layer Llama whose rows hold whole blocks of every quantisation."""
    return random_model("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)


KINDS = [
    kind.name
    for kind in GGMLQuantizationType
    if kind.name.startswith(
        ("Q4", "Q5", "Q8_0", "Q2", "Q3", "Q6", "IQ", "TQ", "BF16", "F16", "MX", "NV")
    )
]


@pytest.mark.parametrize("kind", KINDS)
def test_quantisation(kind: str, tmp_path: Path) -> None:
    """Every weight is what gguf unpacks, rounded once to bf16."""
    quantisation = GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    unpacked: dict[str, np.ndarray[Any, Any]] = {}

    def encode(name: str, values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        if values.ndim == 1:
            return gguf_files.as_f32(name, values)
        try:
            data = gguf.quants.quantize(values, quantisation)
        except NotImplementedError:
            # No packer: any bytes will do whose halves are small finite numbers.
            block, size = GGML_QUANT_SIZES[quantisation]
            shape = (values.shape[0], values.shape[1] // block * size)
            data = rng.integers(0, 0x30, shape, dtype=np.uint8)
        unpacked[name] = gguf.quants.dequantize(data, quantisation)
        return data, quantisation

    model = wide_model()
    write_model(tmp_path / "model.gguf", model, "llama", encode=encode)
    got = load(convert_gguf(tmp_path / "model.gguf"), torch.bfloat16)
    stored = {}
    for name, weight in gguf_files.gguf_tensors(got, "llama"):
        if name in unpacked:
            stored[name] = weight
            want = torch.from_numpy(unpacked[name].copy()).to(torch.bfloat16).float()
            assert torch.isfinite(want).all()
            assert torch.equal(weight, want), name
    assert stored.keys() == unpacked.keys()
    if kind in ("Q8_0", "F16", "BF16"):
        got, model = got.float()(IDS).logits, model(IDS).logits
        assert (got - model).norm() < 0.1 * model.norm()


def test_text_from_a_gguf_file(tmp_path: Path) -> None:
    model = random_model("qwen2")
    prompt = IDS[0, :10].tolist()
    plain = reference_generate(model, prompt, 24, eos_token_id=None)
    path = tmp_path / "model.gguf"
    write_model(path, model, "qwen2", extra=lambda writer: writer.add_eot_token_id(plain[7]))
    params = SamplingParams(temperature=0, max_tokens=24)
    output = LLM(path, dtype="fp32").generate([prompt], params)[0]
    end = min(plain.index(token) for token in (2, plain[7]) if token in plain)
    assert list(output.token_ids) == plain[: end + 1]
    assert output.finish_reason is FinishReason.STOP


def test_tied_and_untied_in_one_file_each(tmp_path: Path) -> None:
    for tied in (True, False):
        path = tmp_path / f"{tied}.gguf"
        write_model(path, random_model("qwen2", tie_word_embeddings=tied), "qwen2")
        got = load(convert_gguf(path))
        assert (got.lm_head.weight is got.model.embed_tokens.weight) == tied


def test_padded_embedding(tmp_path: Path) -> None:
    """The embedding has more rows than the tokenizer has tokens: all are kept."""
    want = random_model("llama", vocab_size=gguf_files.VOCAB_SIZE + 10)
    write_model(tmp_path / "model.gguf", want, "llama")
    got = load(convert_gguf(tmp_path / "model.gguf"))
    assert_same_model(got, want)
    assert got.config.vocab_size == gguf_files.VOCAB_SIZE + 10


def refusal(tmp_path: Path, kind: str = "llama", **options: Any) -> str:
    path = tmp_path / "model.gguf"
    write_model(path, random_model(kind), kind, **options)
    return tiny.error_line(convert_gguf, path)


def test_unknown_quantisation(tmp_path: Path) -> None:
    def encode(name: str, values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        if name != "blk.0.ffn_up.weight":
            return gguf_files.as_f32(name, values)
        return np.zeros((1, 292), np.uint8), GGMLQuantizationType.Q8_K

    message = refusal(tmp_path, encode=encode)
    assert "tensor blk.0.ffn_up.weight is Q8_K, which cannot be unpacked; these can: F32" in message
    assert all(f" {kind}" in message for kind in ("Q4_0", "Q6_K", "IQ4_XS"))


def test_quantisation_that_gguf_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, random_model("llama"), "llama")
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    kind = data.index(name) + len(name) + 4 + 2 * 8
    data[kind : kind + 4] = (250).to_bytes(4, "little")
    path.write_bytes(data)
    message = tiny.error_line(convert_gguf, path)
    assert "tensor blk.0.ffn_up.weight has quantisation type 250" in message
    assert "upgrade gguf" in message


def test_unknown_setting_is_not_dropped(tmp_path: Path) -> None:
    def extra(writer: GGUFWriter) -> None:
        writer.add_float32("llama.attention.max_alibi_bias", 8.0)

    message = refusal(tmp_path, extra=extra)
    assert "llama.attention.max_alibi_bias is 8.0: this is not understood" in message
    assert message.endswith("use the model's safetensors checkpoint instead")


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("attention.value_length", 8, "keys have 16 dimensions"),
        ("rope.dimension_count", 8, "its heads have 16 dimensions"),
        ("attention.causal", False, "only causal language models"),
        ("rope.scaling.type", "su", "known are none, linear, yarn"),
    ],
)
def test_setting_without_an_equal(key: str, value: object, part: str, tmp_path: Path) -> None:
    def extra(writer: GGUFWriter) -> None:
        full = f"llama.{key}"
        writer.kv_data[0].pop(full, None)
        if key == "rope.scaling.type":
            writer.add_float32("llama.rope.scaling.factor", 2.0)
        add = {int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string}[type(value)]
        add(full, value)

    message = refusal(tmp_path, extra=extra)
    assert f"llama.{key} is {value!r}" in message
    assert part in message


def test_layers_of_different_width(tmp_path: Path) -> None:
    def extra(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.attention.head_count_kv")
        writer.add_array("llama.attention.head_count_kv", [2, 1])

    assert "head_count_kv is [2, 1]: layers that differ in it" in refusal(tmp_path, extra=extra)


def test_same_in_all_layers(tmp_path: Path) -> None:
    def extra(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.attention.head_count_kv")
        writer.add_array("llama.attention.head_count_kv", [2, 2])

    want = random_model("llama")
    write_model(tmp_path / "model.gguf", want, "llama", extra=extra)
    assert_same_model(load(convert_gguf(tmp_path / "model.gguf")), want)


def test_factors_of_no_known_rule(tmp_path: Path) -> None:
    def extra(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8).astype(np.float32))

    assert "rope_freqs.weight follow no rope scaling" in refusal(tmp_path, extra=extra)


def test_tensor_without_a_place(tmp_path: Path) -> None:
    def extra(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32))

    message = refusal(tmp_path, extra=extra)
    assert "1 tensors that LlamaForCausalLM has no place for, blk.0.attn_sinks.weight" in message


def test_tensor_of_another_shape(tmp_path: Path) -> None:
    def encode(name: str, values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        return gguf_files.as_f32(name, values[:-1] if name == "blk.1.attn_v.weight" else values)

    message = refusal(tmp_path, encode=encode)
    assert "blk.1.attn_v.weight has the shape (31, 64)" in message
    assert "model.layers.1.self_attn.v_proj.weight its (32, 64)" in message


def test_no_model(tmp_path: Path) -> None:
    def extra(writer: GGUFWriter) -> None:
        writer.add_type("adapter")

    assert "is no model (general.type 'adapter')" in refusal(tmp_path, extra=extra)
