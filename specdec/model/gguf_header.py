"""Reading the header of a GGUF file, far enough to know what is in it and whether it is whole.

The format is little-endian: magic, version, counts, key-value metadata, tensor descriptions, then
the tensor data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from specdec.errors import ModelError

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 1 << 28
_MAX_STRING = 1 << 26


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in the file and how it is stored.

    Attributes:
        name: as llama.cpp calls it.
        shape: outermost dimension first, as in torch.
        quantisation: the name of its ggml type, such as `"Q4_K"` or `"F16"`.
        offset: of its first byte, from the start of the file.
        num_bytes: what it takes in the file.
    """

    name: str
    shape: tuple[int, ...]
    quantisation: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
        path: the file.
        metadata: key -> value; arrays of strings and numbers as lists.
        tensors: by name, in the file's order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def num_elements(self) -> int:
        """Weights in all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


class _Truncated(Exception):
    """The file ends inside its header."""


class _Reader:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def take(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise _Truncated
        return data

    def scalar(self, fmt: str) -> Any:
        return struct.unpack(fmt, self.take(struct.calcsize(fmt)))[0]

    def string(self) -> str:
        size = self.scalar("<Q")
        if size > _MAX_STRING:
            raise ValueError(f"a string of {size} bytes")
        return self.take(size).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > _MAX_ARRAY:
            raise ValueError(f"an array of {count} values")
        if kind in _SCALARS:
            fmt = f"<{count}{_SCALARS[kind][1]}"
            return list(struct.unpack(fmt, self.take(struct.calcsize(fmt))))
        return [self.value(kind) for _ in range(count)]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of the GGUF file at `path`.

    Raises:
        ModelError: not a GGUF file, an unknown version or quantisation type, or a file that is cut
            short.
    """
    try:
        with path.open("rb") as stream:
            return _read(path, stream)
    except _Truncated:
        raise ModelError(
            f"{path} ends inside its header: the file is cut short, download it again"
        ) from None
    except (ValueError, struct.error, MemoryError, OverflowError) as error:
        raise ModelError(
            f"{path} is not a readable GGUF file ({error}): download it again"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _read(path: Path, stream: BinaryIO) -> GgufHeader:
    reader = _Reader(stream)
    magic = reader.take(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file (it starts with {magic!r}): download it again")
    version = reader.scalar("<I")
    if version not in (2, 3):
        raise ModelError(
            f"{path} is GGUF version {version}; versions 2 and 3 are read: convert it again with "
            "a current llama.cpp"
        )
    num_tensors, num_values = reader.scalar("<Q"), reader.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("<I"))
    tensors = [_tensor(path, reader) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32)) or 32
    start = -(-stream.tell() // alignment) * alignment
    tensors = [replace(tensor, offset=start + tensor.offset) for tensor in tensors]
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors), default=start)
    have = path.stat().st_size
    if have < end:
        raise ModelError(
            f"{path} is cut short: its header promises {end:,} bytes and it has {have:,}; "
            "download it again"
        )
    return GgufHeader(path, metadata, {tensor.name: tensor for tensor in tensors})


def _tensor(path: Path, reader: _Reader) -> GgufTensor:
    """The next description; its offset still counts from the start of the tensor data."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = reader.string()
    num_dims = reader.scalar("<I")
    if num_dims > 8:
        raise ValueError(f"a tensor with {num_dims} dimensions")
    shape = tuple(reader.scalar("<Q") for _ in range(num_dims))[::-1]
    kind, offset = reader.scalar("<I"), reader.scalar("<Q")
    try:
        quantisation = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
    except (ValueError, KeyError):
        raise ModelError(
            f"{path}: tensor {name} has quantisation type {kind}, which this gguf package does not "
            "know: upgrade gguf, or take a file with another quantisation"
        ) from None
    size = math.prod(shape) // block * block_bytes
    return GgufTensor(name, shape, quantisation.name, offset, size)
