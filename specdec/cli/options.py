"""Options that several commands share, and what they turn into."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.request import Speculation

if TYPE_CHECKING:
    from specdec.llm import LLM

DEFAULT_DRAFT = "ngram"

_ENGINE = "Engine"
_SPECULATION = "Speculation"
_SAMPLING = "Sampling (what is not given is the model's default)"


class SpeculationChoice(StrEnum):
    """Values of --speculation."""

    OFF = "off"
    FIXED = "fixed"
    AUTO = "auto"


class GenerationConfigChoice(StrEnum):
    """Values of --generation-config."""

    AUTO = "auto"
    NONE = "none"


Model = Annotated[
    str, typer.Argument(help="A named model, a hub id, a folder, or a .gguf file.", metavar="MODEL")
]
Draft = Annotated[
    list[str] | None,
    typer.Option(
        help="Draft to load: none or ngram; may be repeated. Default: ngram.",
        rich_help_panel=_ENGINE,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="auto (the checkpoint's), bf16, fp16 or fp32.", rich_help_panel=_ENGINE),
]
Device = Annotated[str, typer.Option(help="Where the model runs.", rich_help_panel=_ENGINE)]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and output together; default: the model's limit.",
        rich_help_panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[
    int, typer.Option(help="Requests that run at once; more wait.", rich_help_panel=_ENGINE)
]
MaxBatchTokens = Annotated[
    int, typer.Option(help="Rows of one pass at most.", rich_help_panel=_ENGINE)
]
PageSize = Annotated[
    int, typer.Option(help="Tokens of a KV page, a power of two.", rich_help_panel=_ENGINE)
]
NumPages = Annotated[
    int | None,
    typer.Option(help="KV pages; default: sized from memory.", rich_help_panel=_ENGINE),
]
PrefixCache = Annotated[
    bool, typer.Option(help="Reuse the KV of prompts that begin alike.", rich_help_panel=_ENGINE)
]
GenerationConfig = Annotated[
    GenerationConfigChoice,
    typer.Option(
        help="auto: sampling defaults from the model's generation_config.json; none: neutral ones.",
        rich_help_panel=_ENGINE,
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option(help="Run Python code that the model brings.", rich_help_panel=_ENGINE)
]

SpeculationMode = Annotated[
    SpeculationChoice | None,
    typer.Option("--speculation", help="Default: auto.", rich_help_panel=_SPECULATION),
]
MaxNodes = Annotated[
    int | None,
    typer.Option(help="Drafted nodes a step at most; default: 15.", rich_help_panel=_SPECULATION),
]
MaxDepth = Annotated[
    int | None,
    typer.Option(help="Depth of a tree at most; default: 15.", rich_help_panel=_SPECULATION),
]

MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        help="Most tokens to generate; default: the room left.",
        rich_help_panel=_SAMPLING,
    ),
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option(help="0 keeps all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float | None, typer.Option(rich_help_panel=_SAMPLING)]
MinP = Annotated[float | None, typer.Option(rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[float | None, typer.Option(rich_help_panel=_SAMPLING)]
PresencePenalty = Annotated[float, typer.Option(rich_help_panel=_SAMPLING)]
FrequencyPenalty = Annotated[float, typer.Option(rich_help_panel=_SAMPLING)]
Seed = Annotated[
    int | None,
    typer.Option(help="The same seed gives the same text.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", help="Text that ends the answer; may be repeated.", rich_help_panel=_SAMPLING
    ),
]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", help="May be repeated.", rich_help_panel=_SAMPLING),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after EOS.", rich_help_panel=_SAMPLING)
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="With --json: alternatives per token.", rich_help_panel=_SAMPLING),
]


def speculation_of(
    mode: SpeculationChoice | None, max_nodes: int | None, max_depth: int | None
) -> Speculation | None:
    """The speculation that the options ask for; None if none was given."""
    values: dict[str, Any] = {
        "mode": mode.value if mode is not None else None,
        "max_nodes": max_nodes,
        "max_depth": max_depth,
    }
    values = {name: value for name, value in values.items() if value is not None}
    return Speculation(**values) if values else None


def load_llm(
    model: str,
    *,
    draft: list[str] | None,
    generation_config: GenerationConfigChoice,
    speculation: Speculation | None,
    **settings: Any,
) -> LLM:
    """Load a model behind an engine; settings: further arguments of LLM.

    Raises ModelError or InvalidRequestError.
    """
    from rich.console import Console

    from specdec.model import resolve_model

    path = resolve_model(model)  # shows progress of its own if it has to download
    errors = Console(stderr=True)
    # Off when stderr is no terminal: a status shows nothing there.
    with errors.status(f"loading {model}"):
        from specdec.llm import LLM

        return LLM(
            path,
            draft=draft or DEFAULT_DRAFT,
            generation_config=generation_config.value,
            speculation=speculation or Speculation(),
            **settings,
        )
