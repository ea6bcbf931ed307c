"""The check to run where a GPU is: correctness, equality of bits, and times against the floor.

    python -m specdec_kernels.checks.gpu [--out FOLDER] [--seconds 330]
    python -m specdec_kernels.checks.gpu --interpret        its own logic, on a CPU, in seconds

Cases run in child processes, because one bad memory access ends a process for good: the case is
recorded, and a new process goes on with the next. The cases of correctness run in parallel and
first, so that they compile every variant that is timed later. Writes FOLDER/NAME.jsonl while it
runs and FOLDER/NAME.md at the end. Ends with 0 if nothing failed, 1 if something did, 2 if there
is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specdec_kernels.checks import records
from specdec_kernels.checks.cases import Case, Setting, SkippedError, all_cases
from specdec_kernels.checks.records import Record
from specdec_kernels.checks.rivals import RIVALS

MOST_VARIANTS = 40
MOST_PROCESSES = 8
CASE_SECONDS = 90
_CONTEXT_LOST = 3


def run_case(case: Case, setting: Setting) -> Record:
    """Runs one case; nothing but the end of the process keeps it from a record."""
    started = time.perf_counter()
    variants = _watch_compiler()
    figures: dict[str, Any] = {}
    status: records.Status = "passed"
    detail = ""
    try:
        figures = case.run(setting)
    except SkippedError as reason:
        status, detail = "skipped", str(reason)
    except torch.OutOfMemoryError as error:
        status, detail = "skipped", f"out of memory: {error}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        status = "failed"
    figures = {**figures, "variants": sorted(variants)}
    return Record(case.name, status, round(time.perf_counter() - started, 3), detail, figures)


def _watch_compiler() -> set[str]:
    """A set that fills with what Triton compiles or takes from its disk cache from now on."""
    seen: set[str] = set()
    if os.environ.get("TRITON_INTERPRET") == "1":
        return seen
    import triton

    def listener(*, metadata: dict[str, Any], **_: Any) -> None:
        seen.add(str(metadata["hash"])[:12])

    triton.knobs.compilation.listener = listener
    return seen


def child(results: Path, interpret: bool) -> int:
    """Runs the cases whose names come in on stdin, one record each."""
    wanted = set(json.load(sys.stdin))
    setting = Setting(torch.device("cpu" if interpret else "cuda"), tiny=interpret)
    for case in all_cases(setting.tiny):
        if case.name not in wanted:
            continue
        record = run_case(case, setting)
        records.append(results, record)
        if record.status == "failed" and not interpret:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return _CONTEXT_LOST
    return 0


class Conductor:
    """Hands cases to child processes until all have a record or time is up."""

    def __init__(self, results: Path, command: list[str], deadline: float, bar: tqdm[Any]) -> None:
        self._results = results
        self._command = command
        self._deadline = deadline
        self._bar = bar

    def run(self, names: list[str], processes: int) -> None:
        """Every name gets a record, whatever happens to the processes."""
        shares = [names[first::processes] for first in range(min(processes, len(names)))]
        with tempfile.TemporaryDirectory() as logs:
            running = [
                _Share(share, self._command, Path(logs) / str(index))
                for index, share in enumerate(shares)
            ]
            while running:
                time.sleep(0.1)
                recorded = {record.name for record in records.read(self._results)}
                self._bar.update(len(recorded) - self._bar.n)
                for share in running:
                    share.forget(recorded)
                running = [share for share in running if self._goes_on(share)]

    def _goes_on(self, share: _Share) -> bool:
        code = share.process.poll()
        if time.monotonic() > self._deadline:
            share.kill()
            for name in share.names:
                self._give_up(name, "skipped", "out of time")
            return False
        if code is None and share.idle_seconds() > CASE_SECONDS:
            share.kill()
            self._give_up(share.names.pop(0), "failed", f"no result in {CASE_SECONDS} s")
        elif code is None:
            return True
        elif code != _CONTEXT_LOST and share.names:
            text = f"its process ended with {code}: {share.last_words()}"
            self._give_up(share.names.pop(0), "failed", text)
        if share.names:
            share.start()
        return bool(share.names)

    def _give_up(self, name: str, status: records.Status, detail: str) -> None:
        records.append(self._results, Record(name, status, 0.0, detail, {}))


class _Share:
    """Names without a record, and the process that works on them."""

    def __init__(self, names: list[str], command: list[str], log: Path) -> None:
        self.names = list(names)
        self._command = command
        self._log = log
        self.start()

    def start(self) -> None:
        wanted = self._log.with_suffix(".json")
        wanted.write_text(json.dumps(self.names), encoding="utf-8")
        with wanted.open("rb") as stdin, self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=log
            )
        self._changed = time.monotonic()

    def forget(self, recorded: set[str]) -> None:
        left = [name for name in self.names if name not in recorded]
        if len(left) < len(self.names):
            self._changed = time.monotonic()
        self.names = left

    def idle_seconds(self) -> float:
        return time.monotonic() - self._changed

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def last_words(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-300:]


def variants_of(written: list[Record]) -> set[str]:
    """What was compiled of our kernels; others' compilers go through Triton too."""
    others = tuple(rival.name for rival in RIVALS)
    ours = [record for record in written if not record.name.endswith(others)]
    return {variant for record in ours for variant in record.figures.get("variants", [])}


def facts(interpret: bool, seconds: float, written: list[Record]) -> dict[str, Any]:
    """What a reader has to know to trust the page."""
    return {
        "device": "Triton's interpreter on a CPU" if interpret else torch.cuda.get_device_name(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": ", ".join(
            f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton")
        ),
        "seconds": round(seconds),
        "compiled variants": f"{len(variants_of(written))} (at most {MOST_VARIANTS})",
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("evals/results"), help="folder to write")
    parser.add_argument("--name", default=f"{datetime.now(UTC):%Y-%m-%d}-gpu-check")
    parser.add_argument("--seconds", type=float, default=330.0, help="then the rest is skipped")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the check; returns the exit code."""
    options = parse(arguments)
    if options.child:
        return child(options.child, options.interpret)
    if not options.interpret and not torch.cuda.is_available():
        print("No GPU was found: torch.cuda.is_available() is false. --interpret runs the check's "
              "own logic on a CPU.", file=sys.stderr)  # fmt: skip
        return 2
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / f"{options.name}.jsonl"
    results.unlink(missing_ok=True)
    names = [c.name for c in all_cases(options.interpret) if options.only in c.name]
    command = [sys.executable, "-m", "specdec_kernels.checks.gpu", "--child", str(results)]
    if options.interpret:
        command.append("--interpret")
        os.environ["TRITON_INTERPRET"] = "1"
    with tqdm(total=len(names), unit="case", desc="Checking") as bar:
        conductor = Conductor(results, command, started + options.seconds, bar)
        first = [name for name in names if name.startswith("correct/")]
        conductor.run(first, min(MOST_PROCESSES, os.cpu_count() or 1))
        conductor.run([name for name in names if name not in first], 1)
    return report(options, results, names, time.monotonic() - started)


def report(options: argparse.Namespace, results: Path, names: list[str], seconds: float) -> int:
    """Writes the page, prints what failed; 1 if something did."""
    order = {name: index for index, name in enumerate(names)}
    written = sorted(records.read(results), key=lambda record: order[record.name])
    about = facts(options.interpret, seconds, written)
    page = results.with_suffix(".md")
    page.write_text(records.markdown(about, written), encoding="utf-8")
    failed = [record for record in written if record.status == "failed"]
    for record in failed:
        print(f"FAILED {record.name}: {record.detail}")
    variants = variants_of(written)
    if len(variants) > MOST_VARIANTS:
        print(f"FAILED: {len(variants)} variants were compiled, the check may use {MOST_VARIANTS}")
    skipped = sum(record.status == "skipped" for record in written)
    print(
        f"{len(written)} cases in {seconds:.0f} s, {len(failed)} failed, {skipped} skipped: {page}"
    )
    return 1 if failed or len(variants) > MOST_VARIANTS or not written else 0


if __name__ == "__main__":
    sys.exit(main())
