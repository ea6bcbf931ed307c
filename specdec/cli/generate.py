"""`specdec generate`: answers to one prompt, from a model in this process or from a server."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from specdec.cli import options
from specdec.cli.answer import Answer, read_answers
from specdec.cli.groups import spread
from specdec.cli.source import AnswerStream, Source, lacks_chat_template, opened
from specdec.errors import InvalidRequestError
from specdec.request import SamplingParams, Speculation
from specdec.tokenizer import Prompt

_STDIN = "-"


@spread
def generate(
    model: options.OptionalModel = None,
    prompt_argument: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads stdin.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; - reads stdin.")
    ] = None,
    server: options.Server = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            metavar="",
            help="With the model's chat template, or as it is. Default: with it if there is one.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="One JSON object a line for each answer.")
    ] = False,
    quiet: options.Quiet = False,
    *,
    sampling: options.GenerateSampling,
    grammar: options.GrammarOptions,
    speculation: options.SpeculationOptions,
    engine: options.Engine,
) -> None:
    """Answer one prompt, with a model in this process or a server.

    Text goes to stdout as it comes, statistics to stderr. Ctrl-C ends the answer (status 130).
    """
    model, text = _model_and_prompt(model, prompt_argument, prompt, server)
    for flag in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, flag) is not None and not as_json:
            raise typer.BadParameter(f"--{flag.replace('_', '-')} shows in --json only: add it")
    request = _Request(text, sampling.params(grammar), speculation.speculation())
    with opened(model, server, engine) as source:
        answers, stream, interrupted = _ask(source, request, chat, echo=not as_json)
    for index, answer in enumerate(answers):
        if as_json:
            typer.echo(answer.as_json(index, stream.seeds.get(index)))
    if not quiet:
        for index, answer in enumerate(answers):
            label = f"answer {index + 1}: " if len(answers) > 1 else ""
            typer.echo(label + answer.summary(), err=True)
    if interrupted:
        raise typer.Exit(130)


@dataclass(frozen=True)
class _Request:
    text: str
    params: SamplingParams
    speculation: Speculation | None

    @property
    def as_chat(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def _ask(
    source: Source, request: _Request, chat: bool | None, *, echo: bool
) -> tuple[list[Answer], AnswerStream, bool]:
    """Ask with the chat template unless chat is False; without it if there is none to be had."""

    def ask(prompt: Prompt) -> tuple[list[Answer], AnswerStream, bool]:
        stream = source.generate(prompt, request.params, request.speculation)
        answers, interrupted = read_answers(stream, request.params.n, echo=echo)
        return answers, stream, interrupted

    if chat is False:
        return ask(request.text)
    try:
        return ask(request.as_chat)
    except InvalidRequestError as error:
        # Only the source knows whether its model has a chat template.
        if chat or not lacks_chat_template(error):
            raise
    return ask(request.text)


def _model_and_prompt(
    model: str | None, positional: str | None, option: str | None, server: str | None
) -> tuple[str | None, str]:
    """Sort out MODEL, PROMPT and --prompt; a lone argument is the prompt if it can only be that."""
    if positional is None and option is None and (server is not None or model == _STDIN):
        model, positional = None, model
    if positional is not None and option is not None:
        raise typer.BadParameter("give the prompt once: as an argument or with --prompt")
    prompt = option if positional is None else positional
    if prompt is None:
        raise typer.BadParameter("no prompt: give one with --prompt, or - to read stdin")
    if prompt == _STDIN:
        prompt = sys.stdin.read()
    return model, prompt
