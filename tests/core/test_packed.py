"""Packed linear layers and fp32 pages: the same result, and nothing of the user's is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import LLM, SamplingParams
from specdec.model import packed
from specdec.model.skeleton import make_skeleton
from specdec.runner import TargetRunner
from specdec.testing import tiny_gpt2, tiny_llama, tiny_qwen2
from specdec_kernels import cache_dtype
from specdec_kernels.tree_attention import cpu as attention

GREEDY = SamplingParams(temperature=0, max_tokens=8)
needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bf16 arithmetic"
)


@needs_bf16
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen2], ids=lambda make: make.__name__)
def test_every_linear_is_packed_and_says_the_same(make: object) -> None:
    model = make().to(torch.bfloat16)  # type: ignore[operator]
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear]
    skeleton, _ = make_skeleton(model)
    assert packed.can_pack(skeleton)
    replaced = packed.pack_linears(skeleton)
    assert {id(m.weight) for m in replaced} == {id(m.weight) for m in linears}
    originals = dict(model.named_modules())
    rows = {m.in_features: torch.randn(1, 5, m.in_features).bfloat16() for m in linears}
    for name, layer in skeleton.named_modules():
        if isinstance(layer, packed.PackedLinear):
            want = originals[name](rows[layer.in_features]).float()
            got = layer(rows[layer.in_features]).float()
            assert (got - want).norm() < 0.01 * want.norm()


@needs_bf16
def test_a_layer_that_comes_out_different_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama().to(torch.bfloat16)
    skeleton, _ = make_skeleton(model)

    def doubled(layer: packed.PackedLinear, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.new_ones(*inputs.shape[:-1], layer.out_features)

    monkeypatch.setattr(packed.PackedLinear, "forward", doubled)
    assert packed.pack_linears(skeleton) == []
    assert "stays unpacked" in caplog.text
    assert not any(isinstance(m, packed.PackedLinear) for m in skeleton.modules())


def test_only_bf16_is_packed() -> None:
    assert not packed.can_pack(tiny_llama())
    assert TargetRunner(tiny_llama()).pack() == []


@needs_bf16
def test_a_module_of_the_users_keeps_its_weights() -> None:
    model = tiny_llama().to(torch.bfloat16)
    before = {name: p.clone() for name, p in model.named_parameters()}
    LLM(model).generate([3, 4, 5], GREEDY)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@needs_bf16
def test_a_model_of_our_own_drops_what_is_packed_and_keeps_what_is_tied(tmp_path: Path) -> None:
    tied = tiny_qwen2().to(torch.bfloat16)
    tied.save_pretrained(tmp_path)
    llm = LLM(tmp_path)
    plain = LLM(AutoModelForCausalLM.from_pretrained(tmp_path), pack_linears=False)
    answers = [one.generate([3, 4, 5], GREEDY)[0].token_ids for one in (llm, plain)]
    assert answers[0] == answers[1]
    sizes = {name: p.numel() for name, p in llm._loaded.model.named_parameters()}
    assert sizes["model.embed_tokens.weight"] == tied.get_input_embeddings().weight.numel()
    assert sizes["model.layers.0.mlp.up_proj.weight"] == 0
    assert sizes["model.norm.weight"] > 0


@pytest.mark.parametrize("compiled", [True, False])
def test_pages_are_kept_in_the_dtype_that_attention_reads_fastest(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled attention converts while it reads; in torch it computes in fp32 throughout."""
    monkeypatch.setattr(attention, "is_compiled", lambda: compiled)
    monkeypatch.setattr(attention, "NATIVE_DTYPES", frozenset())
    cpu = torch.device("cpu")
    kept = torch.float16 if compiled else torch.float32
    assert cache_dtype(torch.float32, cpu) == torch.float32
    assert cache_dtype(torch.float16, cpu) == kept
    assert cache_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    runner = TargetRunner(tiny_gpt2().to(torch.float16))
    runner.allocate(2, 16)
    assert runner.kv.layer(0)[0].dtype == runner.kv_dtype == kept
    assert runner.bytes_per_slot == sum(one.bytes_per_slot(kept) for one in runner.layers)
