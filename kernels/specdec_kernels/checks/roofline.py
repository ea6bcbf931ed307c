"""What a GPU allows: bytes, operations and the shortest possible time of every operation.

    python -m specdec_kernels.checks.roofline

prints the table of kernels/README.md. A floor is the larger of bytes over memory bandwidth and
operations over the rate of dense bf16 matrix instructions; every byte counts once, as if caches
held nothing of the call before and lost nothing within it. Launches cost 2 to 5 microseconds on
top, which is all that the small operations cost.
"""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """bandwidth: bytes/s of device memory. flops: dense bf16 with fp32 sums, per second."""

    name: str
    bandwidth: float
    flops: float


H200 = Device("H200", 4.8e12, 989e12)
H100 = Device("H100 SXM", 3.35e12, 989e12)
A100 = Device("A100 80 GB", 2.04e12, 312e12)
DEVICES = (H200, H100, A100)


class Work(NamedTuple):
    """bytes: read and written. flops: in matrix instructions; other arithmetic is not counted."""

    bytes: float
    flops: float = 0.0

    def floor_s(self, device: Device) -> float:
        """Seconds that no implementation can beat."""
        return max(self.bytes / device.bandwidth, self.flops / device.flops)


class Shape(NamedTuple):
    """A model and one step of it: R requests of L committed tokens with T nodes each.

    kv_bytes: of one element of the cache; an element of 1 byte has fp32 scales, one a token and
    head. layers: only compact_kv takes all of them in one call.
    """

    requests: int = 8
    committed: int = 4096
    nodes: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    kv_bytes: int = 2
    layers: int = 32
    vocabulary: int = 128_256

    @property
    def rows(self) -> int:
        """S."""
        return self.requests * self.nodes

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in one layer, scales included."""
        per_head = self.head_dim * self.kv_bytes + (4 if self.kv_bytes == 1 else 0)
        return 2 * self.kv_heads * per_head


def tree_attention(shape: Shape) -> Work:
    """One layer: the context once a request, queries in and results out, both in 16 bits."""
    cache = shape.requests * (shape.committed + shape.nodes) * shape.token_bytes
    rows = shape.rows * shape.heads * shape.head_dim * 2 * 2
    # A row sees at least the committed tokens and itself; 2 matmuls of 2 operations an element.
    flops = 4 * shape.rows * shape.heads * shape.head_dim * (shape.committed + 1)
    return Work(cache + rows + shape.rows * 8, flops)


def prompt_attention(shape: Shape) -> Work:
    """One layer of a chunk: the same, with the causal half of the chunk's own keys."""
    work = tree_attention(shape)
    own = 4 * shape.rows * shape.heads * shape.head_dim * (shape.nodes - 1) / 2
    return Work(work.bytes, work.flops + own)


def write_kv(shape: Shape) -> Work:
    """One layer: rows in in 16 bits, tokens out, one slot a row."""
    incoming = shape.rows * 2 * shape.kv_heads * shape.head_dim * 2
    return Work(incoming + shape.rows * (shape.token_bytes + 8))


def compact_kv(shape: Shape, moved: int = 4) -> Work:
    """All layers: `moved` tokens a request are read and written."""
    return Work(2 * shape.requests * moved * shape.layers * shape.token_bytes)


def tree_layout(shape: Shape) -> Work:
    """Parents in; depth, position, slot, ancestor words and 16 lanes out."""
    words = -(-shape.nodes // 64)
    return Work(shape.rows * (4 + 4 + 8 + 8 + 8 * words + 16 * 4))


def accept(shape: Shape) -> Work:
    """Parents, tokens and the law's tokens in, the path out."""
    return Work(shape.rows * (4 + 8 + 8 + 4))


def sample(shape: Shape) -> Work:
    """fp32 logits of every row read once, one token and log-probability a row out."""
    return Work(shape.rows * (shape.vocabulary * 4 + 12))


EXAMPLE = Shape()
_QUANTISED = EXAMPLE._replace(kv_bytes=1)
_LONG = EXAMPLE._replace(requests=1, committed=32768)
_CHUNK = EXAMPLE._replace(requests=1, nodes=512)

ROWS: tuple[tuple[str, Work], ...] = (
    ("`tree_attention`, bf16 cache", tree_attention(EXAMPLE)),
    ("`tree_attention`, int8 or fp8 cache", tree_attention(_QUANTISED)),
    ("`tree_attention`, one request of 32,768 tokens", tree_attention(_LONG)),
    ("`tree_attention`, one prompt chunk of 512 rows", prompt_attention(_CHUNK)),
    ("`write_kv`, bf16 cache", write_kv(EXAMPLE)),
    ("`write_kv`, int8 or fp8 cache", write_kv(_QUANTISED)),
    ("`compact_kv`, 4 tokens a request, all 32 layers", compact_kv(EXAMPLE)),
    ("`tree_layout`", tree_layout(EXAMPLE)),
    ("`accept`", accept(EXAMPLE)),
    ("`sample`", sample(EXAMPLE)),
)


def markdown() -> str:
    """The table of the README: one line an operation, floors in microseconds."""
    names = [f"{device.name}, us" for device in DEVICES]
    lines = [
        "| operation | MB | GFLOP | " + " | ".join(names) + " |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for name, work in ROWS:
        floors = [f"{work.floor_s(device) * 1e6:.3g}" for device in DEVICES]
        flops = f"{work.flops / 1e9:.3g}" if work.flops else "-"
        lines.append(f"| {name} | {work.bytes / 1e6:.3g} | {flops} | {' | '.join(floors)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
