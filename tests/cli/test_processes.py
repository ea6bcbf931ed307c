"""The commands as processes: signals, exit codes, and the demo."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from specdec.cli.serve import LISTENING, READY
from specdec.request import SamplingParams, Speculation
from specdec.rpc.client import Client
from specdec.rpc.errors import ServerError
from tests.cli.conftest import Run

pytestmark = pytest.mark.e2e


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "specdec", *arguments]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def read_until(child: subprocess.Popen[str], beginning: str) -> list[str]:
    """Lines of stdout up to the one that begins so."""
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(beginning):
            return lines
    raise AssertionError(
        f"ended without {beginning!r}: {lines}, {child.stderr and child.stderr.read()}"
    )


def test_serve_and_signals(tiny_folder: str) -> None:
    with process(
        "serve", tiny_folder, "--port", "0", "--grace", "1", "--num-pages", "300"
    ) as serve:
        first = read_until(serve, LISTENING)[-1]
        address = first.removeprefix(LISTENING).split(",")[0]
        banner = "\n".join(read_until(serve, READY))
        for words in (tiny_folder, "draft  ngram", "pages  300 of 16 tokens", "ready in"):
            assert words in banner
        with Client(address) as client:
            client.wait_ready(5)
            interrupt_generate(address)
            # 2,900 passes take longer than the grace.
            long = SamplingParams(temperature=0.0, max_tokens=2900, ignore_eos=True)
            stream = client.generate([1, 2], long, Speculation(mode="off"))
            next(stream)
            serve.send_signal(signal.SIGTERM)
            started = time.monotonic()
            with pytest.raises(ServerError) as caught:
                list(stream)
            assert caught.value.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        out, err = serve.communicate(timeout=20)
        assert serve.returncode == 0, err
        assert time.monotonic() - started < 10
        assert out == "stopping: running requests get 1 s\n"
        assert err == ""


def interrupt_generate(address: str) -> None:
    options = [
        "-p",
        "x",
        "-n",
        "2900",
        "--temperature",
        "0",
        "--no-chat",
        "--speculation",
        "off",
        "--ignore-eos",
    ]
    with process("generate", "--server", address, *options) as generate:
        assert generate.stdout is not None
        text = generate.stdout.read(5)
        generate.send_signal(signal.SIGINT)
        rest, err = generate.communicate(timeout=20)
        assert len(text) == 5
        assert rest.endswith("\n")
        assert generate.returncode == 130, err
        assert err.splitlines()[-1].endswith(" · abort")
        assert " tokens · " in err


def test_sigterm_while_loading_ends_the_server(tiny_folder: str) -> None:
    with process("serve", tiny_folder, "--port", "0") as serve:
        read_until(serve, LISTENING)
        serve.send_signal(signal.SIGTERM)
        _, err = serve.communicate(timeout=20)
        assert serve.returncode == 0, err
        assert err == ""


def test_demo(run: Run, tiny_folder: str) -> None:
    result = run("demo", tiny_folder, "-n", "16", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    assert "server: ready in" in result.stdout
    assert "16 tokens · " in result.stdout
    for words in ("tokens/s with speculation off and on", "on / off", "acceptance length"):
        assert words in result.stdout
    assert "All 5 texts are identical with and without speculation." in result.stdout


def test_demo_ends_as_its_server_does(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    result = run("demo", "./no/such/model")
    assert result.exit_code == 1
    assert result.stderr == ""
    lines = capfd.readouterr().err.splitlines()  # the server's own
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
