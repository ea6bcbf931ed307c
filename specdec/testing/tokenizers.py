"""A small fast tokenizer into which any text encodes, made without a download."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS_TOKEN, EOS_TOKEN, TURN_START, TURN_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_WORDS = (
    "the and ing ion ent that this with you for are was not have from they will one all would "
    "there their what out about which when make can like time just him know take people into "
    "year your good some could them see other than then now look only come over think also "
    "back after use two how our work first well way even new want because any these give day "
    "most us ha stop user system assistant"
)


def tiny_tokenizer(vocab_size: int = 512, *, add_bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly vocab_size ids, with BOS, EOS and a ChatML template.

    Ids 0..3 are <s>, </s>, <|im_start|>, <|im_end|>; the 256 bytes follow, then merges of common
    English words and of ASCII letter pairs. Characters outside ASCII take one token a byte, so an
    answer may end inside a character. add_bos: text gets a BOS in front, as with Llama tokenizers.

    Raises ValueError if vocab_size is not in 260..900.
    """
    if not 260 <= vocab_size <= 900:
        raise ValueError(f"vocab_size must be in 260..900, got {vocab_size}")
    specials = [BOS_TOKEN, EOS_TOKEN, TURN_START, TURN_END]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    known = set(tokens)
    for left, right in _merges():
        if len(tokens) == vocab_size:
            break
        if left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append((left, right))
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS_TOKEN} $A", special_tokens=[(BOS_TOKEN, 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS_TOKEN, eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _merges() -> list[tuple[str, str]]:
    """Word merges (with a leading space, the byte-level sign of which is G-dot), then pairs."""
    merges = []
    for word in _WORDS.split():
        piece = "Ġ"
        for letter in word:
            merges.append((piece, letter))
            piece += letter
    letters = "etaoinshrdlucmfwypvbgk"
    merges += [(left, right) for left in letters for right in letters]
    return merges
