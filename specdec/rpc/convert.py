"""Between the messages of the wire and the records of the Python API."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from specdec.errors import InvalidRequestError, SpecdecError
from specdec.output import RequestDelta, RequestStats, TokenLogprobs
from specdec.request import FinishReason, SamplingParams, Speculation
from specdec.rpc.params import naming_field, sampling_params_to_wire, speculation_to_wire
from specdec.tokenizer import Prompt
from specdec.v1 import inference_pb2 as pb

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_REASONS_BACK = {value: reason for reason, value in _REASONS.items()}
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_PROMPT_FIELDS = {"tokenized": "tokenized.input_ids", "text": "text", "chat": "chat.messages"}
_STATS_ON_WIRE = (
    "num_decode_passes",
    "num_spec_steps",
    "num_draft_tokens",
    "num_draft_path_tokens",
    "num_accepted_draft_tokens",
)


# Server side: requests in, responses out.


def prompt_of(request: pb.GenerateRequest) -> Prompt:
    """The prompt of a request. Raises InvalidRequestError if it has none or an empty one."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError("input", "must be one of tokenized, text and chat")
    if kind == "text":
        return request.text
    if kind == "tokenized":
        return list(request.tokenized.input_ids)
    if not request.chat.messages:
        raise InvalidRequestError("chat.messages", "must hold at least one message")
    return [{"role": m.role, "content": m.content} for m in request.chat.messages]


def refuse_unknown_fields(message: Message, prefix: str = "") -> None:
    """Raise InvalidRequestError for a field, at any depth, that the contract does not have.

    It may come from a client of a later contract, and may be a parameter that decides what is said.
    """
    for unknown in _unknown_fields(message):
        raise InvalidRequestError(f"{prefix}{unknown}", "is no field that this server knows")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for child in value if field.is_repeated else (value,):
            refuse_unknown_fields(child, f"{prefix}{field.name}.")


def _unknown_fields(message: Message) -> Iterator[int]:
    unknown = UnknownFieldSet(message)
    return (unknown[i].field_number for i in range(len(unknown)))


def wire_field(error: InvalidRequestError, request: pb.GenerateRequest) -> InvalidRequestError:
    """The same error with its field named as on the wire, for example sampling_params.top_p."""
    field = error.field
    if field.partition(".")[0] in _SAMPLING_FIELDS:
        field = f"sampling_params.{field}"
    elif field in ("prompt", "prompt_token_ids"):
        field = _PROMPT_FIELDS.get(request.WhichOneof("input") or "", "input")
    return InvalidRequestError(field, error.message)


def api_field(field: str) -> str:
    """The name in the Python API of a field that the wire calls so."""
    if field == "input" or field in _PROMPT_FIELDS.values():
        return "prompt"
    return field.removeprefix("sampling_params.")


def chunk_to_wire(
    delta: RequestDelta, completion_tokens: int, prompt_token_ids: Sequence[int]
) -> pb.GenerateStreamChunk:
    """A delta as a chunk.

    completion_tokens: emitted so far, this delta included. prompt_token_ids: of the whole prompt;
    its first token has no entry in prompt_logprobs that could name it.
    """
    input_logprobs = None
    if delta.prompt_logprobs:
        input_logprobs = _prompt_logprobs_to_wire(delta.prompt_logprobs, prompt_token_ids[0])
    return pb.GenerateStreamChunk(
        text=delta.text,
        token_ids=delta.token_ids,
        output_logprobs=_logprobs_to_wire(delta.logprobs) if delta.logprobs else None,
        prompt_tokens=delta.stats.num_prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=delta.stats.num_cached_tokens,
        num_decode_passes=delta.stats.num_decode_passes,
        index=delta.index,
        input_logprobs=input_logprobs,
    )


def _logprobs_to_wire(logprobs: Sequence[TokenLogprobs]) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in logprobs],
        token_ids=[entry.token_id for entry in logprobs],
        ranks=[entry.rank for entry in logprobs],
        top_logprobs=[_top_to_wire(entry) for entry in logprobs],
    )


def _top_to_wire(entry: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=entry.top.values(), token_ids=entry.top.keys())


def _prompt_logprobs_to_wire(
    entries: Sequence[TokenLogprobs | None], first_token: int
) -> pb.InputLogProbs:
    message = pb.InputLogProbs()
    for entry in entries:
        if entry is None:
            message.token_ids.append(first_token)
            message.ranks.append(0)
            message.token_logprobs.add()
            message.top_logprobs.add()
        else:
            message.token_ids.append(entry.token_id)
            message.ranks.append(entry.rank)
            message.token_logprobs.add(value=entry.logprob)
            message.top_logprobs.append(_top_to_wire(entry))
    return message


def complete_to_wire(
    delta: RequestDelta, seed: int, prompt_token_ids: Sequence[int] = ()
) -> pb.GenerateComplete:
    """The end of an answer, from its last delta (whose finish_reason is set)."""
    assert delta.finish_reason is not None
    stats = delta.stats
    message = pb.GenerateComplete(
        finish_reason=_REASONS[delta.finish_reason],
        prompt_tokens=stats.num_prompt_tokens,
        completion_tokens=stats.num_output_tokens,
        cached_tokens=stats.num_cached_tokens,
        num_preemptions=stats.num_preemptions,
        seed=seed,
        spec_decode=pb.SpecDecodeStats(
            acceptance_histogram=stats.acceptance_histogram,
            acceptance_length=stats.acceptance_length,
            mean_acceptance_length=stats.mean_acceptance_length,
            acceptance_rate=stats.acceptance_rate,
            path_acceptance_rate=stats.path_acceptance_rate,
            **{name: getattr(stats, name) for name in _STATS_ON_WIRE},
        ),
        timings=pb.Timings(
            time_to_first_token_seconds=stats.time_to_first_token,
            decode_seconds=max(0.0, stats.last_token_time - stats.first_token_time),
        ),
        prompt_token_ids=prompt_token_ids,
        index=delta.index,
    )
    if isinstance(delta.stop_reason, str):
        message.matched_stop_str = delta.stop_reason
    elif delta.stop_reason is not None:
        message.matched_token_id = delta.stop_reason
    return message


# Client side: requests out, responses in.


def request_to_wire(
    prompt: Prompt,
    params: SamplingParams | None = None,
    speculation: Speculation | None = None,
    *,
    request_id: str = "",
    return_prompt_token_ids: bool = False,
) -> pb.GenerateRequest:
    """A request for the wire. Raises InvalidRequestError naming a field that cannot be sent."""
    with naming_field("request_id"):
        message = pb.GenerateRequest(request_id=request_id)
    if return_prompt_token_ids:
        message.return_prompt_token_ids = True
    if params is not None:
        message.sampling_params.CopyFrom(sampling_params_to_wire(params))
    if speculation is not None:
        message.speculation.CopyFrom(speculation_to_wire(speculation))
    try:
        _set_prompt(message, prompt)
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidRequestError(
            "prompt", f"must be text, token ids or messages with role and content ({error!r})"
        ) from error
    return message


def _set_prompt(message: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = prompt
        return
    for item in prompt:
        if isinstance(item, Mapping):
            message.chat.messages.add(role=item["role"], content=item["content"])
        else:
            message.tokenized.input_ids.append(item)
    if not prompt:
        message.tokenized.SetInParent()


def delta_of_chunk(request_id: str, chunk: pb.GenerateStreamChunk) -> RequestDelta:
    """A chunk as a delta; its statistics are the running totals that a chunk carries."""
    return RequestDelta(
        request_id=request_id,
        token_ids=tuple(chunk.token_ids),
        text=chunk.text,
        logprobs=_logprobs_of(chunk.output_logprobs),
        finish_reason=None,
        stop_reason=None,
        stats=RequestStats(
            num_prompt_tokens=chunk.prompt_tokens,
            num_cached_tokens=chunk.cached_tokens,
            num_output_tokens=chunk.completion_tokens,
            num_decode_passes=chunk.num_decode_passes,
        ),
        index=chunk.index,
        prompt_logprobs=(
            _prompt_logprobs_of(chunk.input_logprobs) if chunk.HasField("input_logprobs") else None
        ),
    )


def _logprobs_of(message: pb.OutputLogProbs) -> tuple[TokenLogprobs, ...]:
    return tuple(_entries_of(message, message.token_logprobs))


def _prompt_logprobs_of(message: pb.InputLogProbs) -> tuple[TokenLogprobs | None, ...]:
    logprobs = message.token_logprobs
    entries = _entries_of(message, [logprob.value for logprob in logprobs])
    return tuple(
        entry if logprob.HasField("value") else None
        for entry, logprob in zip(entries, logprobs, strict=True)
    )


def _entries_of(
    message: pb.OutputLogProbs | pb.InputLogProbs, logprobs: Iterable[float]
) -> Iterator[TokenLogprobs]:
    """The parallel lists of a message, entry by entry; logprobs: its token_logprobs as numbers."""
    lists = (message.token_ids, logprobs, message.ranks, message.top_logprobs)
    for token_id, logprob, rank, top in zip(*lists, strict=True):
        yield TokenLogprobs(
            token_id, logprob, rank, dict(zip(top.token_ids, top.values, strict=True))
        )


def delta_of_complete(request_id: str, complete: pb.GenerateComplete) -> RequestDelta:
    """The end of an answer as a delta without tokens; times count from the request's arrival.

    Raises SpecdecError for a finish reason that this client does not know.
    """
    matched = complete.WhichOneof("matched_stop")
    spec = complete.spec_decode
    first = complete.timings.time_to_first_token_seconds
    if complete.finish_reason not in _REASONS_BACK:
        value = complete.finish_reason
        raise SpecdecError(f"finish_reason: this client does not know {value}; update it")
    return RequestDelta(
        request_id=request_id,
        token_ids=(),
        text="",
        logprobs=(),
        finish_reason=_REASONS_BACK[complete.finish_reason],
        stop_reason=None if matched is None else getattr(complete, matched),
        stats=RequestStats(
            num_prompt_tokens=complete.prompt_tokens,
            num_cached_tokens=complete.cached_tokens,
            num_output_tokens=complete.completion_tokens,
            num_preemptions=complete.num_preemptions,
            acceptance_histogram=list(spec.acceptance_histogram),
            first_token_time=first,
            last_token_time=first + complete.timings.decode_seconds,
            **{name: getattr(spec, name) for name in _STATS_ON_WIRE},
        ),
        index=complete.index,
    )
