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

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """A new decoder of text that appears token by token."""
        return TextStream(self)


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

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
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
        whole = self._tokenizer.decode(self._token_ids)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""
