"""A conversation: what was said, one turn at a time, and the commands that change it."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from specdec.cli.answer import read_answer
from specdec.cli.source import Source, lacks_chat_template
from specdec.errors import InvalidRequestError, ModelError, SpecdecError
from specdec.grammar import Grammar
from specdec.request import MAX_SEED, FinishReason, SamplingParams, Speculation, SpeculationMode

NO_TEMPLATE = (
    "the model has no chat template, so it cannot hold a conversation: use "
    "`specdec generate --no-chat`, which sends the prompt as it is"
)


@dataclass(frozen=True)
class Turn:
    """A question and the text of its answer, complete or cut off by the user."""

    question: str
    answer: str


class Conversation:
    """Questions and answers; the whole of it is sent with each question.

    The prefix cache makes that cheap: what was sent or answered before is not computed again, up to
    whole pages.

    say: shows a line about the conversation, never part of an answer.
    num_failed: turns that got no answer. is_over: the user asked to leave.
    """

    def __init__(
        self,
        source: Source,
        params: SamplingParams,
        speculation: Speculation | None,
        *,
        system: str | None,
        show_stats: bool,
        say: Callable[[str], None],
    ) -> None:
        self.turns: list[Turn] = []
        self.num_failed = 0
        self.is_over = False
        self._source = source
        self._params = params
        self._speculation = speculation
        self._system = system
        self._show_stats = show_stats
        self._say = say
        self._num_retries = 0
        self._commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "/help": (self._help, "", "this list"),
            "/reset": (self._reset, "", "begin a new conversation"),
            "/system": (self._set_system, "[TEXT]", "set the system message, or remove it"),
            "/stats": (self._set_stats, "on|off", "statistics after each answer"),
            "/undo": (self._undo, "", "forget the last question and its answer"),
            "/retry": (self._retry, "", "answer the last question again"),
            "/params": (self._list_params, "", "the parameters in force"),
            "/exit": (self._leave, "", "leave, as Ctrl-D does"),
        }

    def read(self, line: str) -> None:
        """Take a line from the user: a command or a question.

        Returns after the answer. Raises ModelError if the model cannot hold a conversation, and
        InterruptedAnswer after an answer that Ctrl-C ended.
        """
        if not line.startswith("/"):
            if line.strip():
                self._ask(line)
            return
        name, _, argument = line.partition(" ")
        if name in self._commands:
            self._commands[name][0](argument.strip())
        else:
            self._say(
                f"there is no command {name}: /help lists them. Put a space first to send the line"
            )

    def messages(self, question: str) -> list[dict[str, str]]:
        """The conversation as it is sent with a new question."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        past = [
            {"role": role, "content": content}
            for turn in self.turns
            for role, content in (("user", turn.question), ("assistant", turn.answer))
        ]
        return [*system, *past, {"role": "user", "content": question}]

    def _ask(self, question: str) -> None:
        try:
            stream = self._source.generate(
                self.messages(question), self._params_of_turn(), self._speculation
            )
            answer, interrupted = read_answer(stream, echo=True)
        except SpecdecError as error:
            self.num_failed += 1
            self._say(self._advice(error))
            return
        if answer.text or not interrupted:
            self.turns.append(Turn(question, answer.text))
        if self._show_stats:
            self._say(answer.summary())
        if self._ran_out(answer.finish_reason, len(answer.token_ids)):
            self._say("the context is full: /reset begins anew, /undo takes the last turn back")
        if interrupted:
            raise InterruptedAnswer

    def _params_of_turn(self) -> SamplingParams:
        """The same seed would give the same answer again, so a retry adds one to it."""
        if self._params.seed is None or not self._num_retries:
            return self._params
        seed = (self._params.seed + self._num_retries) % (MAX_SEED + 1)
        return dataclasses.replace(self._params, seed=seed)

    def _ran_out(self, reason: FinishReason, num_tokens: int) -> bool:
        """Whether an answer ended because the context did, not at --max-tokens."""
        limit = self._params.max_tokens
        return reason is FinishReason.LENGTH and (limit is None or num_tokens < limit)

    def _advice(self, error: SpecdecError) -> str:
        if not isinstance(error, InvalidRequestError) or error.field != "prompt":
            return f"no answer: {error}"
        if lacks_chat_template(error):
            raise ModelError(NO_TEMPLATE) from error
        if "context" not in error.message:
            return f"no answer: {error.message}"
        if not self.turns:
            return f"no answer: the message does not fit, it {error.message}"
        return (
            f"no answer: the conversation no longer fits, it {error.message}. "
            "/reset begins a new one, /undo takes the last turn back"
        )

    def _help(self, argument: str) -> None:
        for name, (_, arguments, what) in self._commands.items():
            self._say(f"  {f'{name} {arguments}':<15}  {what}")
        self._say("  Ctrl-C ends an answer and keeps what was said; a last \\ continues a line")

    def _leave(self, argument: str) -> None:
        self.is_over = True

    def _reset(self, argument: str) -> None:
        self.turns.clear()
        kept = "" if self._system is None else "; the system message stays"
        self._say(f"a new conversation{kept}")

    def _set_system(self, argument: str) -> None:
        self._system = argument or None
        self._say("the system message is set" if argument else "no system message any more")

    def _set_stats(self, argument: str) -> None:
        if argument not in ("on", "off"):
            self._say("/stats needs on or off")
            return
        self._show_stats = argument == "on"
        self._say(f"statistics are {argument}")

    def _undo(self, argument: str) -> None:
        if not self.turns:
            self._say("nothing to undo")
            return
        turn = self.turns.pop()
        self._say(f"forgotten: {textwrap.shorten(turn.question, 60)}")

    def _retry(self, argument: str) -> None:
        if not self.turns:
            self._say("nothing to retry")
            return
        turn = self.turns.pop()
        self._num_retries += 1
        num_turns = len(self.turns)
        try:
            self._ask(turn.question)
        finally:
            if len(self.turns) == num_turns:  # it got no answer: the old one stays
                self.turns.append(turn)

    def _list_params(self, argument: str) -> None:
        defaults = SamplingParams()
        given = {
            field.name: getattr(self._params, field.name)
            for field in dataclasses.fields(SamplingParams)
            if getattr(self._params, field.name) != getattr(defaults, field.name)
        }
        for name, value in given.items():
            shown = value.kind if isinstance(value, Grammar) else value
            self._say(f"  {name} = {shown}")
        self._say("  all others are the model's defaults" if given else "  the model's defaults")
        if self._speculation is not None:
            self._say(
                f"  speculation {SpeculationMode(self._speculation.mode).value}, up to "
                f"{self._speculation.max_nodes} nodes of depth {self._speculation.max_depth}"
            )


class InterruptedAnswer(Exception):
    """The user ended the running answer; what had come is part of the conversation."""
