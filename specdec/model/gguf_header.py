"""Reading the header of a GGUF file, far enough to know whether the file is whole.

The format is little-endian: magic, version, counts, key-value metadata, tensor descriptions, then
the tensor data (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
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
class GgufHeader:
    """The metadata of a GGUF file.

    Attributes:
        metadata: key -> value; arrays of strings and numbers as lists.
        num_elements: weights in all tensors together.
        num_tensors: tensors in the file.
    """

    metadata: dict[str, Any]
    num_elements: int
    num_tensors: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


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
        ModelError: not a GGUF file, an unknown version, or a file that is cut short.
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
    tensors = [_tensor(reader) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32)) or 32
    start = -(-stream.tell() // alignment) * alignment
    end = start + max((offset + size for _, offset, size in tensors), default=0)
    have = path.stat().st_size
    if have < end:
        raise ModelError(
            f"{path} is cut short: its header promises {end:,} bytes and it has {have:,}; "
            "download it again"
        )
    return GgufHeader(metadata, sum(count for count, _, _ in tensors), num_tensors)


def _tensor(reader: _Reader) -> tuple[int, int, int]:
    """Elements, offset and bytes of the next described tensor."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    reader.string()
    num_dims = reader.scalar("<I")
    if num_dims > 8:
        raise ValueError(f"a tensor with {num_dims} dimensions")
    count = math.prod(reader.scalar("<Q") for _ in range(num_dims))
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(reader.scalar("<I"))]
    offset = reader.scalar("<Q")
    return count, offset, count // block * block_bytes
