"""Text to token ids and back: prompts, chats, and text that appears token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeGuard

from specdec.errors import InvalidRequestError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages ({"role": ..., "content": ...})."""


def is_single_prompt(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    """Whether the argument is one prompt rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], Integral | Mapping)


def is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is a list of chat messages."""
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(item, Mapping) for item in prompt)
    )


class Tokenizer:
    """A fast transformers tokenizer behind the few calls the engine makes.

    Raises ModelError for a tokenizer without a fast (tokenizers) implementation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"{type(tokenizer).__name__} has no fast implementation; "
                "save the model with a tokenizer.json"
            )
        self.hf = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens the tokenizer adds to text."""
        return list(self.hf(text)["input_ids"])

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """Token id sequences of a word: as given, at the start of a text, and after a space.

        As vLLM does for bad_words; a word inside another one may be spelt in other tokens still.
        Raises InvalidRequestError for text that is no Unicode.
        """
        bare = word.lstrip()
        texts = [word, bare, " " + bare] if bare else [word]
        try:
            encoded = [
                tuple(self.hf(text, add_special_tokens=False)["input_ids"]) for text in texts
            ]
        except (TypeError, UnicodeError) as error:
            raise InvalidRequestError("bad_words", f"cannot be encoded: {word!r}") from error
        return [ids for ids in dict.fromkeys(encoded) if ids]

    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat under the model's template, up to where the answer begins.

        Raises InvalidRequestError if there is no template or it does not accept the messages.
        """
        if not self.hf.chat_template:
            raise InvalidRequestError(
                "prompt", "this model has no chat template; send text or token ids"
            )
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise InvalidRequestError("prompt", f"the chat template refused it: {error}") from error
        # The template writes every special token itself; adding them again would double the BOS.
        return list(self.hf(text, add_special_tokens=False)["input_ids"])

    def prompt_token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of any prompt. Raises InvalidRequestError for anything but the three kinds."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        if is_chat(prompt):
            return self.apply_chat(prompt)
        return token_id_list(prompt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, special tokens left out unless asked for."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A new decoder of text that appears token by token."""
        return TextStream(self, skip_special_tokens=skip_special_tokens)


def check_same_tokenizer(
    target: PreTrainedTokenizerBase | None,
    draft_name: str,
    draft: PreTrainedTokenizerBase | None,
) -> None:
    """Refuse a drafter whose token ids mean other strings than the target's.

    target: None if the model has no tokenizer; ids are then all there is, and nothing is checked.
    draft: the tokenizer whose ids the drafter speaks; None for a drafter that speaks the target's.
    Fillers that pad a vocabulary to a round size ("[PAD511]") do not count, nor does the number of
    rows in a model's embedding. Raises ModelError that names both tokenizers.
    """
    if target is None or draft is None:
        return
    ours, theirs = _strings_of_ids(target), _strings_of_ids(draft)
    if ours == theirs:
        return
    token_id = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    strings = (
        f"{_quoted(theirs, token_id)} in the draft's and {_quoted(ours, token_id)} in the target's"
    )
    raise ModelError(
        f"the draft {draft_name} has another tokenizer ({_description(draft)}) than the target "
        f"({_description(target)}): id {token_id} is {strings}; choose a draft made for this target"
    )


def _strings_of_ids(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return {index: token for token, index in vocabulary.items() if token != f"[PAD{index}]"}


def _description(tokenizer: PreTrainedTokenizerBase) -> str:
    name = tokenizer.name_or_path or "unnamed"
    return f"{name}, {type(tokenizer).__name__}, {len(tokenizer)} tokens"


def _quoted(strings: Mapping[int, str], token_id: int) -> str:
    return repr(strings[token_id]) if token_id in strings else "no token"


def token_id_list(prompt: Any) -> list[int]:
    """The prompt as a list of ints. Raises InvalidRequestError if it is not one."""
    ids: list[Any] = list(prompt) if isinstance(prompt, Sequence) else [None]
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise InvalidRequestError(
            "prompt", "must be text, a list of token ids, or a list of chat messages"
        )
    return [int(token) for token in ids]


class TextStream:
    """Incremental text of one request: pieces joined are exactly decode() of all its tokens.

    A piece never ends inside a character: bytes wait until the character is whole, or until
    finish() gives out what is left as decode() shows it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._text = ""

    def push(self, token_id: int) -> str:
        """Text that one more token makes final, possibly empty."""
        self._token_ids.append(token_id)
        piece: str = self._decoder.step(self._tokenizer._backend, token_id) or ""
        self._text += piece
        return piece

    def finish(self) -> str:
        """The rest of the text: what decode() has beyond the pieces given out so far."""
        whole = self._tokenizer.decode(
            self._token_ids, skip_special_tokens=self._skip_special_tokens
        )
        return whole[len(self._text) :] if whole.startswith(self._text) else ""
