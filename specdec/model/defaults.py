"""What a checkpoint says about stopping, sampling and length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

# The value of each parameter that changes nothing.
_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}

_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "model_max_length",
)


def eos_token_ids(
    generation_config: GenerationConfig | None,
    config: PreTrainedConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> frozenset[int]:
    """All token ids that end a text.

    Taken from the first of generation config, model config and tokenizer that names any, which is
    what `model.generate` stops at; the tokenizer's alone would miss a chat model's end of turn.
    """
    text_config = config.get_text_config() if config is not None else None
    for holder in (generation_config, text_config, config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            listed = value if isinstance(value, (list, tuple)) else [value]
            ids = frozenset(int(token) for token in listed)
            if ids:
                return ids
    return frozenset()


def sampling_defaults(generation_config: GenerationConfig | None) -> dict[str, Any]:
    """The sampling parameters that the checkpoint's author recommends.

    As in vLLM: `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty` and `max_new_tokens`
    (as `max_tokens`), only those that `generation_config.json` sets to something that changes the
    result. An explicit `do_sample: false` means temperature 0, and the filters, which are then
    without effect, are left out.
    """
    if generation_config is None:
        return {}
    stated = generation_config.to_diff_dict()
    greedy = generation_config.do_sample is False and "do_sample" in stated
    found: dict[str, Any] = {}
    for name, neutral in _NEUTRAL.items():
        value = stated.get(name)
        if value is None or value == neutral or (greedy and name != "repetition_penalty"):
            continue
        found[name] = int(value) if name == "top_k" else float(value)
    if greedy:
        found["temperature"] = 0.0
    if stated.get("max_new_tokens") is not None:
        found["max_tokens"] = int(stated["max_new_tokens"])
    return found


def max_model_len(config: PreTrainedConfig) -> int | None:
    """The most tokens, prompt and output together, that the model has exact positions for.

    None where the config names no limit. A YaRN factor stretches the length it was trained with.
    Rotary frequencies of the types `dynamic` and `longrope` change with the longest position of a
    batch, not with a row's own, so these end where their scaling would begin (`length_reason`).
    """
    text_config = config.get_text_config()
    length = next(
        (
            int(value)
            for name in _LENGTH_NAMES
            if isinstance(value := getattr(text_config, name, None), int) and value > 0
        ),
        None,
    )
    for rope in _ropes(text_config):
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
        if kind == "longrope" and original:
            length = min(length or original, int(original))
        elif kind == "yarn" and original and length is not None:
            length = max(length, int(original * (rope.get("factor") or 1.0)))
    return length


def length_reason(config: PreTrainedConfig) -> str | None:
    """Why `max_model_len` is less than the model's makers promise; None where it is not."""
    for rope in _ropes(config.get_text_config()):
        kind = rope.get("rope_type")
        if kind in ("dynamic", "longrope"):
            return (
                f"beyond it, {kind} rotary frequencies depend on the longest text of a batch, so a "
                "text's answer would depend on its neighbours"
            )
    return None


def _ropes(text_config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary parameters of a config: one set, or one for each type of layer."""
    found = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]
