"""Small seeded targets: random ones, and ones whose next-token law is known exactly."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

LOG_ZERO = -30.0
"""Stands for ln 0 in the laws below: a probability of 1e-13."""


def _seeded(model_class: type[PreTrainedModel], config: Any, seed: int) -> PreTrainedModel:
    """A model with weights drawn from seed, fp32, in eval mode, without gradients; the global
    random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    model.float().eval().requires_grad_(False)
    return model


def tiny_llama(
    *,
    seed: int = 0,
    vocab_size: int = 512,
    hidden_size: int = 96,
    num_layers: int = 2,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    max_positions: int = 256,
    initializer_range: float = 0.3,
    **config_fields: Any,
) -> PreTrainedModel:
    """TINY: a random Llama with wide gaps between its logits, fp32; it has no EOS.

    config_fields go to LlamaConfig as they are.
    """
    config = LlamaConfig(**_fields(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads, max_position_embeddings=max_positions,
        initializer_range=initializer_range, tie_word_embeddings=False, **config_fields,
    ))  # fmt: skip
    return _seeded(LlamaForCausalLM, config, seed)


def tiny_qwen2(
    *, seed: int = 0, vocab_size: int = 512, max_positions: int = 256, **config_fields: Any
) -> PreTrainedModel:
    """TINY as a Qwen2: biases in q, k and v, tied embeddings."""
    config = Qwen2Config(**_fields(
        vocab_size=vocab_size, hidden_size=96, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=max_positions,
        initializer_range=0.3, tie_word_embeddings=True, **config_fields,
    ))  # fmt: skip
    model = _seeded(Qwen2ForCausalLM, config, seed)
    _randomise_biases(model, seed)
    return model


def tiny_gpt2(
    *, seed: int = 0, vocab_size: int = 512, max_positions: int = 256, **config_fields: Any
) -> PreTrainedModel:
    """TINY as a GPT-2: learned positions, Conv1D layers, as many KV heads as query heads."""
    config = GPT2Config(**_fields(
        vocab_size=vocab_size, n_embd=96, n_layer=2, n_head=6, n_positions=max_positions,
        initializer_range=0.3, **config_fields,
    ))  # fmt: skip
    model = _seeded(GPT2LMHeadModel, config, seed)
    _randomise_biases(model, seed)
    return model


def _fields(**fields: Any) -> dict[str, Any]:
    """Config fields, with no special tokens unless some are asked for."""
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **fields}


def _randomise_biases(model: PreTrainedModel, seed: int) -> None:
    """Give the biases values: fresh models have zeros, which would hide a bias that is dropped."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(0.0, 0.1, generator=generator)


def constant_law_model(law: Sequence[float], *, max_positions: int = 256) -> PreTrainedModel:
    """CONST: a Llama whose next token has the law `law` after every prompt; len(law) ids.

    All embedding rows are equal and the residual branches zero, so the final hidden vector c is one
    constant; row i of lm_head is ln(law_i) * c / |c|^2. Saves as an ordinary checkpoint.
    """
    model = _bare_llama(len(law), hidden_size=32, max_positions=max_positions)
    _weight(model.get_input_embeddings()).fill_(1.0)
    # Ones have a mean square of 1: the final norm leaves them alone but for its epsilon.
    hidden = torch.ones(32, dtype=torch.float64) / (1.0 + model.config.rms_norm_eps) ** 0.5
    rows = _log_law(torch.tensor(law, dtype=torch.float64))[:, None] * (hidden / hidden.dot(hidden))
    _weight(model.get_output_embeddings()).copy_(rows)
    return model


def markov_model(
    transitions: Sequence[Sequence[float]], *, max_positions: int = 256
) -> PreTrainedModel:
    """MARKOV: a Llama whose next token has the law transitions[t], t being the last token.

    Embedding row t is 10 times unit vector t, which the final norm turns into sqrt(hidden) times
    it; lm_head[i, t] is ln(transitions[t][i]) / sqrt(hidden). Saves as an ordinary checkpoint.
    """
    vocab_size = len(transitions)
    hidden_size = max(32, -(-vocab_size // 16) * 16)
    model = _bare_llama(vocab_size, hidden_size=hidden_size, max_positions=max_positions)
    _weight(model.get_input_embeddings()).copy_(10.0 * torch.eye(vocab_size, hidden_size))
    head = torch.zeros(vocab_size, hidden_size, dtype=torch.float64)
    log_law = _log_law(torch.tensor(transitions, dtype=torch.float64))
    head[:, :vocab_size] = log_law.T / hidden_size**0.5
    _weight(model.get_output_embeddings()).copy_(head)
    return model


def script_model(
    script: Sequence[int], first_position: int, *, vocab_size: int = 512, max_positions: int = 256
) -> PreTrainedModel:
    """SCRIPT: a GPT-2 whose token at absolute position first_position + i is script[i], whatever
    came before; the script repeats. For texts that a random model would not say.

    Token embeddings and residual branches are zero; position p is a unit vector that lm_head turns
    into the token at p + 1 with a logit of about 16, all others being near 0.
    """
    hidden_size = -(-max(64, max_positions) // 64) * 64
    config = GPT2Config(**_fields(
        vocab_size=vocab_size, n_embd=hidden_size, n_layer=1, n_head=hidden_size // 64,
        n_positions=max_positions, tie_word_embeddings=False,
    ))  # fmt: skip
    model = _seeded(GPT2LMHeadModel, config, 0)
    for name, parameter in model.named_parameters():
        if "ln_f" not in name:
            parameter.data.zero_()
    positions = cast(Any, model).transformer.wpe
    _weight(positions).copy_(10.0 * torch.eye(max_positions, hidden_size))
    head = _weight(model.get_output_embeddings())
    for position in range(max_positions):
        token = script[(position + 1 - first_position) % len(script)]
        head[token, position] = 16.0 / hidden_size**0.5
    return model


def _log_law(law: torch.Tensor) -> torch.Tensor:
    if not torch.allclose(law.sum(-1), torch.ones_like(law.sum(-1)), atol=1e-9):
        raise ValueError("each law must sum to 1")
    return torch.where(law > 0, law.clamp_min(1e-300).log(), torch.full_like(law, LOG_ZERO))


def _bare_llama(vocab_size: int, *, hidden_size: int, max_positions: int) -> PreTrainedModel:
    """A one-layer Llama whose attention and MLP add nothing to the residual stream."""
    model = tiny_llama(
        vocab_size=vocab_size, hidden_size=hidden_size, num_layers=1, num_heads=2, num_kv_heads=1,
        max_positions=max_positions,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    return model


def _weight(module: torch.nn.Module) -> torch.Tensor:
    return cast(torch.Tensor, module.weight)


def with_eos(model: PreTrainedModel, eos_token_id: int | list[int] | None) -> PreTrainedModel:
    """The same weights under a config whose EOS is eos_token_id (one id, several, or none).

    Weights are shared with `model`, which is left alone.
    """
    shared = {id(p): p for p in model.parameters()} | {id(b): b for b in model.buffers()}
    twin = copy.deepcopy(model, memo=cast(Any, shared))
    twin.config.eos_token_id = eos_token_id
    if twin.generation_config is not None:
        twin.generation_config.eos_token_id = eos_token_id
    return twin


def random_prompts(
    count: int, *, vocab_size: int = 512, longest: int = 60, seed: int = 0
) -> list[list[int]]:
    """Seeded prompts of 1 .. longest random ids."""
    rng = random.Random(seed)
    return [
        [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def first_seen_positions(token_ids: Sequence[int], limit: int) -> list[int]:
    """Positions 0 .. limit-1 of token_ids at which a token appears for the first time (T4)."""
    return [j for j, token in enumerate(token_ids[:limit]) if token not in token_ids[:j]]
