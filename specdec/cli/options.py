"""Options that several commands share, in groups, and what the groups turn into."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import completion
from specdec.grammar import Grammar
from specdec.model.catalog import DEFAULT_MODEL
from specdec.request import SamplingParams, Speculation

if TYPE_CHECKING:
    from specdec.llm import LLM

DEFAULT_DRAFT = "ngram"

_sampling = partial(
    typer.Option, rich_help_panel="Sampling (what is not given is the model's default)"
)
_text = partial(typer.Option, rich_help_panel="Length and text")
# Help of 80 columns cuts the second name off, so the panel's title has it.
_special = partial(
    typer.Option, rich_help_panel="Special tokens have text only with --no-skip-special-tokens"
)
_grammar = partial(typer.Option, rich_help_panel="Form of the answer (at most one)")
_speculation = partial(typer.Option, rich_help_panel="Speculation (never changes the answer)")
_engine = partial(typer.Option, rich_help_panel="Engine")


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
    str,
    typer.Argument(
        help="A named model, a hub id, a folder, or a .gguf file.",
        metavar="MODEL",
        autocompletion=completion.model_names,
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(
        help=f"As for serve; default: {DEFAULT_MODEL}. Not with --server.",
        metavar="MODEL",
        autocompletion=completion.model_names,
    ),
]
Server = Annotated[str | None, typer.Option(help="host:port of a server to ask instead.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="No statistics on stderr.")]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Fields of SamplingParams, under their names, that make sense for every single answer."""

    temperature: Annotated[float | None, _sampling(help="0 is greedy.")] = None
    top_k: Annotated[int | None, _sampling(help="Most probable tokens to keep; 0 keeps all.")] = (
        None
    )
    top_p: Annotated[
        float | None, _sampling(help="Keep the most probable tokens of this mass.")
    ] = None
    min_p: Annotated[
        float | None, _sampling(help="Keep tokens at least this share as probable as the best.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling(help="Above 1: less of what is there already.")
    ] = None
    presence_penalty: Annotated[
        float, _sampling(help="Subtracted from the logits of tokens in the output.")
    ] = 0.0
    frequency_penalty: Annotated[float, _sampling(help="The same, once per occurrence.")] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        _sampling(
            "--logit-bias",
            metavar="ID=VALUE",
            help="Add VALUE to the logit of a token id; may be repeated.",
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        _sampling(
            "--allowed-token-id", metavar="ID", help="Allow only these tokens; may be repeated."
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        _sampling("--bad-word", metavar="TEXT", help="Never say this; may be repeated."),
    ] = None
    seed: Annotated[int | None, _sampling(help="The same seed gives the same text.")] = None

    max_tokens: Annotated[
        int | None,
        _text("--max-tokens", "-n", help="Most tokens to generate; default: the room left."),
    ] = None
    min_tokens: Annotated[
        int, _text(help="Tokens before anything but --max-tokens may end it.")
    ] = 0
    stop: Annotated[
        list[str] | None,
        _text("--stop", metavar="TEXT", help="Text that ends the answer; may be repeated."),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        _text("--stop-token-id", metavar="ID", help="Token that ends it; may be repeated."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool, _text("--include-stop-str", metavar="", help="Keep the text that ended it.")
    ] = False
    ignore_eos: Annotated[bool, _text("--ignore-eos", metavar="", help="Go on after EOS.")] = False
    skip_special_tokens: Annotated[bool, _special(metavar="", show_default=False)] = True
    cache_salt: Annotated[
        str | None, _text(metavar="TEXT", help="Share cached prefixes within this salt only.")
    ] = None

    def params(self, grammar: GrammarOptions) -> SamplingParams:
        """The sampling parameters that these options and the grammar's ask for."""
        values = vars(self) | {
            "logit_bias": _biases(self.logit_bias),
            "grammar": grammar.grammar(),
        }
        # An option that may be repeated is an empty list if it was not given at all.
        given: dict[str, Any] = {n: None if v == [] else v for n, v in values.items()}
        return SamplingParams(**given)


@dataclass(frozen=True, kw_only=True)
class GenerateSampling(Sampling):
    """All fields of SamplingParams that can be written on a command line."""

    n: Annotated[int, _sampling("--n", help="Answers to sample (-n is --max-tokens).")] = 1
    logprobs: Annotated[
        int | None, _text(help="With --json: most probable alternatives to each token.")
    ] = None
    prompt_logprobs: Annotated[
        int | None, _text(help="With --json: the same for the tokens of the prompt.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class GrammarOptions:
    """Fields of Grammar, under their names."""

    json_schema: Annotated[
        str | None, _grammar(metavar="TEXT|@FILE", help="JSON that obeys this schema.")
    ] = None
    json_object: Annotated[bool, _grammar("--json-object", metavar="", help="Any JSON object.")] = (
        False
    )
    regex: Annotated[str | None, _grammar(metavar="TEXT", help="Text that matches as a whole.")] = (
        None
    )
    choice: Annotated[
        list[str] | None,
        _grammar("--choice", metavar="TEXT", help="One of these; repeat for each."),
    ] = None
    ebnf: Annotated[
        str | None, _grammar(metavar="TEXT|@FILE", help="Text of a grammar in Lark or GBNF.")
    ] = None

    def grammar(self) -> Grammar | None:
        """The grammar that was asked for. Raises typer.BadParameter for more than one."""
        given = {
            name: value for name, value in vars(self).items() if value not in (None, False, [])
        }
        if len(given) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise typer.BadParameter(f"{flags} exclude each other: give one")
        for name in {"json_schema", "ebnf"} & given.keys():
            given[name] = _text_or_file(f"--{name.replace('_', '-')}", given[name])
        return Grammar(**given) if given else None


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Fields of Speculation."""

    mode: Annotated[
        SpeculationChoice | None, _speculation("--speculation", help="Default: auto.")
    ] = None
    max_nodes: Annotated[
        int | None, _speculation(help="Drafted nodes a step at most; default: 15.")
    ] = None
    max_depth: Annotated[int | None, _speculation(help="Depth of a tree at most; default: 15.")] = (
        None
    )

    def speculation(self) -> Speculation | None:
        """The speculation that was asked for; None if no option was given."""
        given: dict[str, Any] = {name: v for name, v in vars(self).items() if v is not None}
        return Speculation(**given) if given else None


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a model is loaded and run; the fields are arguments of LLM."""

    draft: Annotated[
        list[str] | None,
        _engine(
            metavar="NAME",
            help="Draft to load; may be repeated. Default: ngram.",
            autocompletion=completion.draft_names,
        ),
    ] = None
    dtype: Annotated[
        str,
        _engine(
            help="auto (the checkpoint's), bf16, fp16 or fp32.",
            autocompletion=completion.dtype_names,
        ),
    ] = "auto"
    device: Annotated[str, _engine(help="Where the model runs.")] = "cpu"
    max_model_len: Annotated[
        int | None,
        _engine(help="Most tokens of prompt and output; default: the model's limit."),
    ] = None
    generation_config: Annotated[
        GenerationConfigChoice,
        _engine(help="auto: the model's own sampling defaults; none: neutral ones."),
    ] = GenerationConfigChoice.AUTO
    trust_remote_code: Annotated[
        bool,
        _engine("--trust-remote-code", metavar="", help="Run Python code that the model brings."),
    ] = False
    adapter: Annotated[
        str | None, _engine(metavar="FOLDER", help="LoRA adapter (PEFT) to merge into the model.")
    ] = None

    def refuse_given(self) -> None:
        """Raise typer.BadParameter if any option was given: a server has an engine already."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) not in (field.default, []):
                flag = field.name.replace("_", "-")
                raise typer.BadParameter(f"--{flag} belongs to the server: not with --server")


@dataclass(frozen=True, kw_only=True)
class ServerEngine(Engine):
    """The engine of a server, which also has to be sized for many requests."""

    max_num_seqs: Annotated[int, _engine(help="Requests that run at once; more wait.")] = 16
    max_batch_tokens: Annotated[int, _engine(help="Rows of one pass at most.")] = 512
    max_chunk_tokens: Annotated[
        int, _engine(help="Prompt rows of a pass while others decode: fewer, smoother streams.")
    ] = 128
    page_size: Annotated[int, _engine(help="Tokens of a KV page, a power of two.")] = 16
    num_pages: Annotated[int | None, _engine(help="KV pages; default: sized from memory.")] = None
    prefix_cache: Annotated[
        bool,
        _engine(metavar="", help="Reuse the KV of prompts that begin alike.", show_default=False),
    ] = True


def load_llm(model: str, engine: Engine, speculation: Speculation | None) -> LLM:
    """Load a model behind an engine. Raises ModelError or InvalidRequestError."""
    from rich.console import Console

    from specdec.model import resolve_model

    path = resolve_model(model)  # shows progress of its own if it has to download
    settings = vars(engine) | {
        "draft": engine.draft or DEFAULT_DRAFT,
        "generation_config": engine.generation_config.value,
        "speculation": speculation or Speculation(),
    }
    # Off when stderr is no terminal: a status shows nothing there.
    with Console(stderr=True).status(f"loading {model}"):
        from specdec.llm import LLM

        return LLM(path, **settings)


def _biases(items: list[str] | None) -> dict[int, float] | None:
    biases: dict[int, float] = {}
    for item in items or ():
        token, _, value = item.partition("=")
        try:
            parsed = (int(token), float(value))
        except ValueError:
            raise typer.BadParameter(
                f"--logit-bias needs ID=VALUE, such as 42=-5, got {item!r}"
            ) from None
        if parsed[0] in biases:
            raise typer.BadParameter(f"--logit-bias names token {parsed[0]} twice")
        biases.update([parsed])
    return biases or None


def _text_or_file(flag: str, value: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise typer.BadParameter(f"{flag} cannot read {value[1:]}: {reason}") from error
