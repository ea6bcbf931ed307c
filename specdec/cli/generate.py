"""`specdec generate`: one answer, from a model in this process or from a server."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli import options
from specdec.cli.answer import Answer, LocalStream, read_answer
from specdec.errors import InvalidRequestError, ModelError
from specdec.model.catalog import DEFAULT_MODEL
from specdec.request import SamplingParams, Speculation
from specdec.tokenizer import Prompt

if TYPE_CHECKING:
    from specdec.llm import LLM

_STDIN = "-"


def generate(
    model: Annotated[
        str | None,
        typer.Argument(help=f"As for serve; default: {DEFAULT_MODEL}. Not with --server."),
    ] = None,
    prompt_argument: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads stdin.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; - reads stdin.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="host:port of a server to ask instead.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put the prompt into the model's chat template, or send it as it is. "
            "Default: the template if the model has one.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No statistics on stderr.")] = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: options.Logprobs = None,
    speculation: options.SpeculationMode = None,
    max_nodes: options.MaxNodes = None,
    max_depth: options.MaxDepth = None,
    draft: options.Draft = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    max_model_len: options.MaxModelLen = None,
    generation_config: options.GenerationConfig = options.GenerationConfigChoice.AUTO,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Generate an answer: text to stdout as it comes, statistics to stderr.

    Ctrl-C ends the answer, prints the statistics and exits with status 130.
    """
    model, text = _model_and_prompt(model, prompt_argument, prompt, server)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
        logprobs=logprobs,
    )
    if server is not None:
        _refuse_engine_options(
            draft=draft is not None,
            dtype=dtype != "auto",
            device=device != "cpu",
            max_model_len=max_model_len is not None,
            generation_config=generation_config is not options.GenerationConfigChoice.AUTO,
            trust_remote_code=trust_remote_code,
        )
    request = _Request(text, params, options.speculation_of(speculation, max_nodes, max_depth))
    if server is not None:
        answer, seed_used, interrupted = _ask_server(server, request, chat, echo=not as_json)
    else:
        llm = options.load_llm(
            model,
            draft=draft,
            dtype=dtype,
            device=device,
            generation_config=generation_config,
            trust_remote_code=trust_remote_code,
            speculation=None,
            max_model_len=max_model_len,
        )
        answer, seed_used, interrupted = _ask_model(llm, request, chat, echo=not as_json)
    if as_json:
        typer.echo(answer.as_json(seed_used))
    if not quiet:
        typer.echo(answer.summary(), err=True)
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


def _ask_model(
    llm: LLM, request: _Request, chat: bool | None, *, echo: bool
) -> tuple[Answer, int, bool]:
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ModelError(f"{llm.model_path} has no tokenizer, so it cannot read a prompt")
    if chat is None:
        chat = bool(tokenizer.hf.chat_template)
    prompt_token_ids = tokenizer.prompt_token_ids(request.as_chat if chat else request.text)
    stream = LocalStream(llm.engine, prompt_token_ids, request.params, request.speculation)
    answer, interrupted = read_answer(stream, echo=echo)
    return answer, stream.seed, interrupted


def _ask_server(
    address: str, request: _Request, chat: bool | None, *, echo: bool
) -> tuple[Answer, int, bool]:
    from specdec.rpc.client import Client

    with Client(address) as client:

        def ask(prompt: Prompt) -> tuple[Answer, int, bool]:
            stream = client.generate(prompt, request.params, request.speculation)
            answer, interrupted = read_answer(stream, echo=echo)
            return answer, stream.seed, interrupted

        if chat is False:
            return ask(request.text)
        try:
            return ask(request.as_chat)
        except InvalidRequestError as error:
            # Only the server knows whether its model has a chat template.
            if chat or error.field != "prompt":
                raise
            return ask(request.text)


def _model_and_prompt(
    model: str | None, positional: str | None, option: str | None, server: str | None
) -> tuple[str, str]:
    """Sort out MODEL, PROMPT and --prompt; a lone argument is the prompt if it can only be that."""
    if positional is None and option is None and (server is not None or model == _STDIN):
        model, positional = None, model
    if positional is not None and option is not None:
        raise typer.BadParameter("give the prompt once: as an argument or with --prompt")
    if server is not None and model is not None:
        raise typer.BadParameter("a server has its model: give MODEL or --server, not both")
    prompt = option if positional is None else positional
    if prompt is None:
        raise typer.BadParameter("no prompt: give one with --prompt, or - to read stdin")
    if prompt == _STDIN:
        prompt = sys.stdin.read()
    return model or DEFAULT_MODEL, prompt


def _refuse_engine_options(**given: bool) -> None:
    """Raise for options of the engine that were given with --server, which has its own."""
    for name, is_given in given.items():
        if is_given:
            flag = name.replace("_", "-")
            raise typer.BadParameter(f"--{flag} belongs to the server: not with --server")
