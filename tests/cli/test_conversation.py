"""What a conversation keeps, sends and says, with a source that answers from a list."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from specdec.cli.conversation import Conversation, InterruptedAnswer, Turn
from specdec.errors import InvalidRequestError, ModelError, SpecdecError
from specdec.request import MAX_SEED, FinishReason, SamplingParams, Speculation
from tests.cli.fakes import FakeSource, delta


class Spoken(Conversation):
    """A conversation whose notes are kept."""

    def __init__(self, *answers: Sequence[Any], system: str | None = None, **params: Any) -> None:
        self.source = FakeSource(list(answers))
        self.notes: list[str] = []
        super().__init__(
            self.source,
            SamplingParams(**params),
            None,
            system=system,
            show_stats=False,
            say=self.notes.append,
        )


def answer(text: str, reason: FinishReason = FinishReason.STOP) -> list[Any]:
    return [delta(text), delta("", reason)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_whole_history_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Spoken(answer("one"), answer(" two "), answer("three"), system="be brief")
    for line in ("a", "b", "", "   ", " /c"):
        talk.read(line)
    system = {"role": "system", "content": "be brief"}
    past = [system, user("a"), assistant("one"), user("b"), assistant(" two "), user(" /c")]
    assert [asked[0] for asked in talk.source.asked] == [past[:2], past[:4], past]
    assert capsys.readouterr().out == "one\n two \nthree\n"
    assert talk.notes == []


def test_commands_that_change_the_history() -> None:
    talk = Spoken()
    for line in ("a", "b", "/undo", "c", "/system be kind", "d", "/system", "/reset", "e"):
        talk.read(line)
    sent = [asked[0] for asked in talk.source.asked]
    assert sent[2] == [user("a"), assistant("yes"), user("c")]
    assert sent[3][0] == {"role": "system", "content": "be kind"}
    assert sent[3][1:] == [*sent[2], assistant("yes"), user("d")]
    assert sent[4] == [user("e")]
    assert talk.notes == [
        "forgotten: b",
        "the system message is set",
        "no system message any more",
        "a new conversation",
    ]


def test_reset_keeps_the_system_message() -> None:
    talk = Spoken(system="be brief")
    talk.read("/reset")
    assert talk.messages("x")[0]["role"] == "system"
    assert "the system message stays" in talk.notes[0]


def test_retry_asks_the_last_question_again_with_the_next_seed() -> None:
    talk = Spoken(answer("one"), answer("two"), answer("three"), seed=MAX_SEED)
    for line in ("a", "b", "/retry"):
        talk.read(line)
    assert talk.turns == [Turn("a", "one"), Turn("b", "three")]
    assert talk.source.asked[2][0] == talk.source.asked[1][0]
    assert [asked[1].seed for asked in talk.source.asked] == [MAX_SEED, MAX_SEED, 0]


def test_retry_without_a_seed_leaves_it_unset() -> None:
    talk = Spoken()
    for line in ("a", "/retry"):
        talk.read(line)
    assert [asked[1].seed for asked in talk.source.asked] == [None, None]


def test_retry_that_fails_keeps_the_old_answer() -> None:
    talk = Spoken(answer("one"), [SpecdecError("gone")])
    for line in ("a", "/retry"):
        talk.read(line)
    assert talk.turns == [Turn("a", "one")]


@pytest.mark.parametrize("command", ["/undo", "/retry"])
def test_nothing_to_take_back(command: str) -> None:
    talk = Spoken()
    talk.read(command)
    assert talk.notes == [f"nothing to {command[1:]}"]
    assert talk.source.asked == []


def test_unknown_command_is_not_sent() -> None:
    talk = Spoken()
    talk.read("/etc/passwd has lines")
    assert talk.source.asked == []
    assert talk.notes[0].startswith("there is no command /etc/passwd: /help lists them")


def test_help_lists_every_command() -> None:
    talk = Spoken()
    talk.read("/help")
    listed = [note.split()[0] for note in talk.notes[:-1]]
    expected = ["/help", "/reset", "/system", "/stats", "/undo", "/retry", "/params", "/exit"]
    assert listed == expected
    column = {note.index(text) for note, text in zip(talk.notes, ["this", "begin", "set"])}  # noqa: B905
    assert len(column) == 1


def test_exit() -> None:
    talk = Spoken()
    talk.read("/exit")
    assert talk.is_over


def test_stats_on_and_off() -> None:
    talk = Spoken()
    for line in ("a", "/stats on", "b", "/stats", "/stats off", "c"):
        talk.read(line)
    assert talk.notes[0] == "statistics are on"
    assert talk.notes[1].startswith("1 token · prompt 0 tokens, 0 cached · first token ")
    assert talk.notes[2:] == ["/stats needs on or off", "statistics are off"]


def test_params() -> None:
    talk = Spoken(temperature=0.5, stop=["x"])
    talk.read("/params")
    assert talk.notes == [
        "  temperature = 0.5",
        "  stop = ('x',)",
        "  all others are the model's defaults",
    ]
    plain = Spoken()
    plain._speculation = Speculation(mode="fixed", max_nodes=3)
    plain.read("/params")
    assert plain.notes == [
        "  the model's defaults",
        "  speculation fixed, up to 3 nodes of depth 15",
    ]


def test_interrupt_keeps_the_partial_text(capsys: pytest.CaptureFixture[str]) -> None:
    def press() -> None:
        signal.raise_signal(signal.SIGINT)

    talk = Spoken([delta("half"), press, delta(" never")], [press, delta("never")])
    with pytest.raises(InterruptedAnswer):
        talk.read("a")
    assert talk.turns == [Turn("a", "half")]
    assert capsys.readouterr().out == "half\n"
    with pytest.raises(InterruptedAnswer):
        talk.read("b")
    assert talk.turns == [Turn("a", "half")]  # no answer had begun


def test_a_failed_turn_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    talk = Spoken(answer("one"), [delta("tw"), SpecdecError("the server is gone")], answer("three"))
    for line in ("a", "b", "c"):
        talk.read(line)
    assert talk.turns == [Turn("a", "one"), Turn("c", "three")]
    assert talk.num_failed == 1
    assert talk.notes == ["no answer: the server is gone"]
    assert capsys.readouterr().out == "one\ntw\nthree\n"


def test_full_context_says_what_to_do() -> None:
    full = InvalidRequestError(
        "prompt", "has 60 tokens; at most 49 leave room for an answer in the context of 50"
    )
    talk = Spoken([full], answer("one"), [full], answer("t", FinishReason.LENGTH))
    for line in ("a", "b", "c", "d"):
        talk.read(line)
    assert talk.notes[0] == f"no answer: the message does not fit, it {full.message}"
    assert talk.notes[1].startswith("no answer: the conversation no longer fits, it has 60 tokens;")
    assert talk.notes[1].endswith("/reset begins a new one, /undo takes the last turn back")
    assert talk.notes[2].startswith("the context is full: /reset begins anew")


def test_max_tokens_is_no_full_context() -> None:
    talk = Spoken(answer("a", FinishReason.LENGTH), max_tokens=2)
    talk.read("a")
    assert talk.notes == []


def test_no_chat_template_ends_it() -> None:
    talk = Spoken([InvalidRequestError("prompt", "this model has no chat template; send text")])
    with pytest.raises(ModelError, match="generate --no-chat"):
        talk.read("a")
