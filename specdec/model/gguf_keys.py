"""The metadata of a GGUF file's architecture, read so that nothing is left out unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.errors import ModelError
from specdec.model.gguf_header import GgufHeader, GgufTensor

_INSTEAD = "use the model's safetensors checkpoint instead"


class GgufKeys:
    """The values under the architecture's prefix; remembers which were asked for."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._prefix = f"{header.architecture}."
        self._asked: set[str] = set()

    @property
    def path(self) -> Path:
        return self._header.path

    @property
    def architecture(self) -> str:
        return self._header.architecture

    @property
    def tensors(self) -> dict[str, GgufTensor]:
        return self._header.tensors

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or `default`; a value that is given per layer must be the same in all.

        Raises:
            ModelError: layers differ.
        """
        value = self.raw(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.refusal(key, value, "layers that differ in it are not read")
            value = value[0]
        if value is None:
            return default
        return _shortest(value) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        """A value that must be there.

        Raises:
            ModelError: it is not, or layers differ.
        """
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path} lacks {self._prefix}{key}: download it again")
        return value

    def raw(self, key: str) -> Any:
        """A value as it stands, possibly a list; None if it is absent."""
        self._asked.add(key)
        return self._header.metadata.get(self._prefix + key)

    def ignore(self, *keys: str) -> None:
        """Say that these keys change nothing."""
        self._asked.update(keys)

    def refusal(self, key: str, value: object, reason: str) -> ModelError:
        """The error for a value that cannot be carried over."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return ModelError(f"{self.path}: {self._prefix}{key} is {shown}: {reason}; {_INSTEAD}")

    def check_all_read(self) -> None:
        """Refuse what nobody asked for: left out, it could change what the model says.

        Raises:
            ModelError: names the first such key.
        """
        for key, value in self._header.metadata.items():
            name = key.removeprefix(self._prefix)
            if key.startswith(self._prefix) and name not in self._asked:
                raise self.refusal(name, value, "this is not understood")


def _shortest(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 1e-05 for 9.999999747378752e-06."""
    import numpy as np

    single = np.float32(value)
    return float(str(single)) if float(single) == value else value
