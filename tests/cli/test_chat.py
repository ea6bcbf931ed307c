"""`specdec chat` with real tiny models: from a pipe, in a terminal, over gRPC."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM
from specdec.cli.source import LocalSource
from specdec.request import SamplingParams
from specdec.testing import script_model, tiny_tokenizer
from tests.cli.conftest import Run
from tests.cli.fakes import FakeSource, delta
from tests.cli.test_conversation import Spoken
from tests.rpc.running import RunningServer

PAGE = 16
SAID = " they will all have the time of the day, and other people like this way;"
OPTIONS = ["--temperature", "0", "-n", "24"]


@pytest.fixture(params=["local", "server"])
def source(request: pytest.FixtureRequest, tiny_folder: str, running: RunningServer) -> list[str]:
    return [tiny_folder] if request.param == "local" else ["--server", running.address]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_one_turn_a_line(run: Run, source: list[str], llm: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    first = llm.generate([user("the day")], params)[0].text
    history = [user("the day"), {"role": "assistant", "content": first}, user("and then")]
    second = llm.generate(history, params)[0].text
    result = run("chat", *source, *OPTIONS, input="the day\nand then\n/exit\nnever\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "".join(
        text if text.endswith("\n") else f"{text}\n" for text in (first, second)
    )
    stats = [line for line in result.stderr.splitlines() if " tokens · " in line]
    assert len(stats) == 2
    assert all(" tokens/s · acceptance length " in line for line in stats)
    assert ", 0 cached · first token " in stats[0] or source[0] == "--server"


def test_system_and_quiet(run: Run, source: list[str], llm: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    messages = [{"role": "system", "content": "be brief"}, user("the day")]
    expected = llm.generate(messages, params)[0].text
    result = run("chat", *source, *OPTIONS, "--system", "be brief", "-q", input="the day")
    assert result.stdout == f"{expected}\n".replace("\n\n", "\n")
    assert result.stderr == ""


def test_the_second_turn_finds_the_first_in_the_cache() -> None:
    """Its cached tokens are the full pages of the first turn's prompt and answer."""
    tokenizer = tiny_tokenizer()
    model = script_model(tokenizer.encode(SAID), 0, max_positions=512)
    llm = LLM(model, tokenizer, num_pages=64)
    talk = Spoken(temperature=0.0, max_tokens=40)
    talk._source = LocalSource(llm)  # type: ignore[assignment]
    talk.read("/stats on")
    talk.read("what will they have after all")
    talk.read("and what about the other people")
    first = tokenizer.apply_chat_template([user("what will they have after all")], tokenize=False)
    held = len(tokenizer.encode(first + "<|im_start|>assistant\n", add_special_tokens=False)) + 40
    # The last emitted token has no KV yet when the first turn ends.
    expected = (held - 1) // PAGE * PAGE
    assert expected > held - 2 * PAGE
    assert f", {expected} cached · " in talk.notes[2]
    assert ", 0 cached · " in talk.notes[1]


def test_a_full_context_is_explained(run: Run, source: list[str]) -> None:
    long = "the time " * 2000
    result = run("chat", *source, *OPTIONS, "-q", input=f"the day\n{long}\n/reset\nthe day\n")
    assert result.exit_code == 1
    refused, reset = result.stderr.splitlines()
    assert refused.startswith("no answer: the conversation no longer fits, it has ")
    assert "/reset begins a new one" in refused
    assert reset == "a new conversation"
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:] != ""  # the same question, the same answer


@pytest.mark.parametrize("where", ["local", "server"])
def test_a_model_without_template(run: Run, tmp_path: Path, tiny_model: Any, where: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    if where == "local":
        tiny_model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        result = run("chat", str(tmp_path), input="hello\n")
    else:
        with RunningServer(lambda: LLM(tiny_model, tokenizer, num_pages=250).engine) as server:
            result = run("chat", "--server", server.address, input="hello\n")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: the model has no chat template")
    assert "generate --no-chat" in result.stderr


def test_wrong_usage(run: Run) -> None:
    both = run("chat", "some-model", "--server", "127.0.0.1:1", input="")
    assert both.exit_code == 2
    assert "give MODEL or --server" in both.stderr


def test_no_server(run: Run) -> None:
    result = run("chat", "--server", "127.0.0.1:1", input="hello\n")
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr


def test_interrupted_pipe_is_status_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.cli import chat as chat_module

    press = [delta("half"), lambda: signal.raise_signal(signal.SIGINT), delta(" never")]
    monkeypatch.setattr(chat_module, "opened", FakeSource([press]).opened)
    result = run("chat", "-q", input="a\nb\n")
    assert (result.exit_code, result.stdout) == (130, "half\n")


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.screen = ""
        self._fd, slave = pty.openpty()
        command = [sys.executable, "-m", "specdec", *arguments]
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True, close_fds=True,
        )  # fmt: skip
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read_until(self, text: str, *, more_than: int = 0, timeout: float = 60.0) -> str:
        """What appeared since the last call: text is in it, and it is longer than that."""
        deadline, start = time.monotonic() + timeout, len(self.screen)
        while text not in self.screen[start:] or len(self.screen) - start <= more_than:
            assert time.monotonic() < deadline, self.screen
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.screen += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:  # the process has closed its end
                    assert text in self.screen[start:], self.screen
        return self.screen[start:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.mark.e2e
def test_in_a_terminal(running: RunningServer) -> None:
    long = ["--ignore-eos", "--temperature", "0", "--speculation", "off"]
    terminal = Terminal("chat", "--server", running.address, *long)
    try:
        banner = terminal.read_until("\n> ")
        assert f"{running.address}: /help lists the commands, Ctrl-D leaves" in banner
        terminal.type("the time\n")
        terminal.read_until("", more_than=40)  # the echo, and some of the answer
        terminal.process.send_signal(signal.SIGINT)
        shown = terminal.read_until("\n> ")
        assert " · abort" in shown
        terminal.type("half a li")
        terminal.read_until("half a li")
        terminal.process.send_signal(signal.SIGINT)  # at the prompt: drops the line
        terminal.read_until("\n> ")
        terminal.type("/undo\n")
        assert "forgotten: the time" in terminal.read_until("\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=20) == 0
    finally:
        terminal.close()
