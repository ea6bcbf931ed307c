"""The offline interface: a model, prompts in, answers out."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import InvalidRequestError, SpecdecError
from specdec.model import eos_token_ids, from_module, load_model, sampling_defaults
from specdec.model import max_model_len as model_limit
from specdec.model.defaults import length_reason
from specdec.model.memory import available_memory
from specdec.model.packed import drop_weights
from specdec.output import RequestDelta, RequestOutput, TokenLogprobs
from specdec.probe import probe
from specdec.request import FinishReason, SamplingParams, Speculation
from specdec.request_state import Request
from specdec.runner import TargetRunner
from specdec.tokenizer import (
    Prompt,
    Tokenizer,
    check_same_tokenizer,
    is_chat,
    is_single_prompt,
    token_id_list,
)
from specdec_drafts import Drafter, make_drafters

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_POOL_SHARE = 0.1
"""Share of the free memory that the page pool may take by default."""


class LLM:
    """A target model with its drafts, ready to generate; one engine, used by one thread.

    model: a name ("smollm2-135m-instruct"), a Hugging Face id, a folder, a .gguf file, or a loaded
        transformers module, which is shared and not changed.
    tokenizer: a fast transformers tokenizer; None takes the model's (none for a module).
    draft: a drafter's name, a Drafter, or a list of these.
    dtype: "auto" (the checkpoint's), a name such as "bfloat16", or a torch.dtype.
    device: where a model that is loaded goes, the CPU by default; a module stays where it is.
    generation_config: "auto" takes sampling defaults from the model's generation_config.json,
        "none" does not; EOS ids are taken either way.
    adapter: the folder or hub id of a LoRA adapter (PEFT) to merge into a model that is loaded.
    Further keywords are the fields of specdec.config.EngineConfig.

    Raises ModelError if the model cannot be found, read or run, InvalidRequestError for a setting.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        draft: str | Drafter | Sequence[str | Drafter] | None = "ngram",
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        generation_config: str = "auto",
        trust_remote_code: bool = False,
        adapter: str | os.PathLike[str] | None = None,
        **engine_config: Any,
    ) -> None:
        config = EngineConfig(**engine_config)
        if generation_config not in ("auto", "none"):
            raise InvalidRequestError(
                "generation_config", f"must be auto or none, got {generation_config!r}"
            )
        try:
            drafters = make_drafters(draft)
        except ValueError as error:
            raise InvalidRequestError("draft", str(error)) from error
        if isinstance(model, str | os.PathLike):
            loaded = load_model(
                model,
                dtype=dtype,
                device=device or "cpu",
                trust_remote_code=trust_remote_code,
                adapter=adapter,
            )
        else:
            _check_module(model, dtype, device, adapter)
            loaded = from_module(model, tokenizer)
        self._loaded = loaded
        self.tokenizer = tokenizer if tokenizer is not None else loaded.tokenizer
        for drafter in drafters:
            check_same_tokenizer(self.tokenizer, drafter.name, getattr(drafter, "tokenizer", None))
        runner = TargetRunner(loaded.model, config.attention)
        limit = _context_limit(config, loaded.model.config)
        packed = runner.pack() if config.pack_linears else []
        probe(loaded.model, runner, limit)
        if isinstance(model, str | os.PathLike):
            drop_weights(loaded.model, packed)
        defaults = sampling_defaults(loaded.generation_config)
        self.engine = Engine(
            runner,
            drafters,
            config,
            max_model_len=limit,
            num_pages=config.num_pages or _default_pages(config, runner, limit),
            tokenizer=None if self.tokenizer is None else Tokenizer(self.tokenizer),
            eos_token_ids=eos_token_ids(
                loaded.generation_config, loaded.model.config, self.tokenizer
            ),
            sampling_defaults=defaults if generation_config == "auto" else {},
        )
        self.engine.warm_up()
        self._ids = itertools.count()

    @property
    def model_path(self) -> Path:
        """A folder that transformers can load the model from."""
        return self._loaded.model_path()

    @property
    def model_source(self) -> str:
        """Where the model came from, in words for a person."""
        return self._loaded.source

    def reset_state(self) -> None:
        """Make the engine cold: drafts, calibration and prefix cache as new."""
        self.engine.reset_state()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculation | Sequence[Speculation] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts; all of them run together, the answers come in the prompts' order.

        prompts: text, token ids or chat messages, one or a list. sampling_params, speculation: one
        for all, or a list with one a prompt. progress: a bar on stderr.
        Returns answer 0 of each prompt; its `outputs` are all n.
        Raises InvalidRequestError before anything runs, or if the parameters of a request leave no
        token to choose from; SpecdecError if a request fails.
        """
        many = [prompts] if is_single_prompt(prompts) else list(cast("Sequence[Prompt]", prompts))
        params = _one_each("sampling_params", sampling_params, len(many))
        speculations = _one_each("speculation", speculation, len(many))
        requests: list[Request] = []
        try:
            for prompt, param, spec in zip(many, params, speculations, strict=True):
                ids = self._prompt_token_ids(prompt)
                request_id = f"llm-{next(self._ids)}"
                requests.append(self.engine.add_request(request_id, ids, param, spec))
            answers = self._run(requests, progress)
        finally:
            # Anything still in the engine belongs to a call that did not end well.
            for request in requests:
                self.engine.abort(request.request_id)
        return [_with_siblings(request, answers) for request in requests]

    def _prompt_token_ids(self, prompt: Prompt) -> list[int]:
        if self.engine.tokenizer is not None:
            return self.engine.tokenizer.prompt_token_ids(prompt)
        if isinstance(prompt, str) or is_chat(prompt):
            raise InvalidRequestError("prompt", "needs a tokenizer; send token ids")
        return token_id_list(prompt)

    def _run(self, requests: Sequence[Request], progress: bool) -> _Answers:
        answers: _Answers = defaultdict(list)
        total = sum(request.params.n for request in requests)
        with tqdm(total=total, unit="answer", disable=None if progress else True) as bar:
            while self.engine.has_work:
                for delta in self.engine.step():
                    if delta.error_field is not None:
                        raise InvalidRequestError(delta.error_field, delta.error or "")
                    if delta.error is not None:
                        raise SpecdecError(f"request {delta.request_id} failed: {delta.error}")
                    answers[delta.request_id, delta.index].append(delta)
                    bar.update(delta.finish_reason is not None)
        return answers


_Answers = dict[tuple[str, int], list[RequestDelta]]
"""Deltas by request id and index of the answer."""


def _with_siblings(request: Request, answers: _Answers) -> RequestOutput:
    """Answer 0 with the other answers to its prompt."""
    outputs = [
        collect_output(answer, answers[request.request_id, answer.index])
        for answer in (request, *request.siblings)
    ]
    return dataclasses.replace(outputs[0], siblings=tuple(outputs[1:]))


def collect_output(request: Request, deltas: Sequence[RequestDelta]) -> RequestOutput:
    """A whole answer from all its deltas."""
    last = deltas[-1]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    if request.params.logprobs is not None:
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
    return RequestOutput(
        deltas[0].request_id,
        request.prompt_token_ids,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        last.finish_reason or FinishReason.ABORT,
        last.stop_reason,
        logprobs,
        request.seed,
        last.stats,
        prompt_logprobs=deltas[0].prompt_logprobs,
        index=request.index,
    )


def _check_module(
    model: PreTrainedModel,
    dtype: str | torch.dtype,
    device: str | None,
    adapter: str | os.PathLike[str] | None,
) -> None:
    """A loaded module is run as it is: refuse settings that ask for something else."""
    if dtype != "auto" and str(dtype).removeprefix("torch.") not in _names_of(model.dtype):
        raise InvalidRequestError("dtype", f"the module is {model.dtype}; convert it, or use auto")
    if device is not None and model.device.type != device.partition(":")[0]:
        raise InvalidRequestError("device", f"the module is on {model.device}, not on {device}")
    if adapter is not None:
        raise InvalidRequestError(
            "adapter",
            "a loaded module is used as it is: merge the adapter yourself (peft's "
            "merge_and_unload) and give the merged module",
        )


def _names_of(dtype: torch.dtype) -> set[str]:
    name = str(dtype).removeprefix("torch.")
    return {name, name.replace("bfloat", "bf").replace("float", "fp")}


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, Sequence):
        if len(value) != count:
            raise InvalidRequestError(
                name, f"needs one entry, or one a prompt: got {len(value)} for {count} prompts"
            )
        return list(value)
    return [value] * count


def _context_limit(config: EngineConfig, model_config: PreTrainedConfig) -> int:
    limit = model_limit(model_config)
    if config.max_model_len is None:
        if limit is None:
            raise InvalidRequestError(
                "max_model_len", "the model's config does not say how long its context is: set it"
            )
        return limit
    if limit is not None and config.max_model_len > limit:
        reason = length_reason(model_config)
        raise InvalidRequestError(
            "max_model_len",
            f"the model's context has {limit} tokens, got {config.max_model_len}"
            + (f": {reason}" if reason else ""),
        )
    return config.max_model_len


def _default_pages(config: EngineConfig, runner: TargetRunner, limit: int) -> int:
    """Pages for max_num_seqs full contexts, or a share of the free memory, at least one context."""
    per_page = config.page_size * runner.bytes_per_slot
    affordable = int(_POOL_SHARE * available_memory()) // per_page
    # A tree's slots lie past the context that a request may fill.
    one = -(-(limit + config.speculation.max_nodes + 1) // config.page_size)
    return max(one, min(config.max_num_seqs * one, affordable))
