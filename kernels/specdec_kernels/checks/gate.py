"""The ahead-of-time gate: every shipped configuration compiles for every GPU we name.

    python -m specdec_kernels.checks.gate [--update] [--only TEXT] [--targets sm_90,gfx942]

No GPU is needed. Prints what each kernel takes and compares it with `compiled.json` beside this
file; ends with 1 if something fails and says what to do about it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from specdec_kernels.checks.table import SHARED_LIMITS, Row, Table, compare, updated

MODULES = tuple(
    f"specdec_kernels.{operation}.triton"
    for operation in ("tree_attention", "write_kv", "compact_kv", "tree_layout", "accept", "sample")
)

Job = tuple[str, str, str]
"""Module, name of the configuration, target."""


def measure(job: Job) -> tuple[Job, Row | None, str]:
    """The figures of one configuration on one target, or what the compiler said."""
    from specdec_kernels.checks.measure import compile_and_measure, configurations_of

    module, name, target = job
    try:
        return job, compile_and_measure(configurations_of(module)[name], target), ""
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return job, None, f"{type(error).__name__}: {lines[0]} ... {lines[-1]}"[:600]


def measure_all(
    jobs: list[Job], processes: int
) -> tuple[dict[str, dict[str, Row]], dict[str, str]]:
    """Rows by configuration and target, and errors by "configuration target"."""
    rows: dict[str, dict[str, Row]] = {}
    errors: dict[str, str] = {}
    if not jobs:
        return rows, errors
    # A fork would inherit torch's threads; only a fresh process is safe to compile in.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        futures = [pool.submit(measure, job) for job in jobs]
        for future in tqdm(as_completed(futures), total=len(jobs), desc="Compiling", unit="kernel"):
            (_, name, target), row, error = future.result()
            if row is None:
                errors[f"{name} {target}"] = error
            else:
                rows.setdefault(name, {})[target] = row
    ordered = {
        name: {target: rows[name][target] for target in SHARED_LIMITS if target in rows[name]}
        for name in sorted(rows)
    }
    return ordered, errors


def format_table(rows: dict[str, dict[str, Row]]) -> str:
    """Registers / spilled bytes / KiB of shared memory / matrix instructions, target by target."""
    targets = [target for target in SHARED_LIMITS if any(target in row for row in rows.values())]
    lines = [["registers/spills/shared KiB/matrix", *targets]]
    for name, row in rows.items():
        cells = [
            f"{row[t][0]}/{row[t][1]}/{row[t][2] / 1024:.0f}/{row[t][3]}" if t in row else "-"
            for t in targets
        ]
        lines.append([name, *cells])
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def select(jobs: list[Job], only: str, targets: list[str], sample: int) -> list[Job]:
    """The jobs that were asked for; a sample is the same on every run."""
    chosen = [job for job in jobs if only in job[1] and job[2] in targets]
    if 0 < sample < len(chosen):
        chosen = random.Random(0).sample(chosen, sample)
    return chosen


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="rewrite the committed table")
    parser.add_argument("--only", default="", help="only configurations whose name holds this")
    parser.add_argument("--targets", default=",".join(SHARED_LIMITS), help="separated by commas")
    parser.add_argument("--sample", type=int, default=0, help="only this many, drawn by seed")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--changelog", type=Path, default=Path("CHANGELOG.md"))
    options = parser.parse_args(arguments)
    options.targets = options.targets.split(",")
    unknown = set(options.targets) - SHARED_LIMITS.keys()
    if unknown:
        parser.error(f"--targets: unknown {sorted(unknown)}; there are {list(SHARED_LIMITS)}")
    options.part = bool(options.only or options.sample or len(options.targets) < len(SHARED_LIMITS))
    if options.update and options.part:
        parser.error(
            "--update: needs a run over everything, without --only, --targets and --sample"
        )
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the gate; returns the exit code."""
    options = parse(arguments)
    if find_spec("triton") is None:
        print("The gate needs Triton: pip install triton", file=sys.stderr)
        return 2
    os.environ.pop("TRITON_INTERPRET", None)
    from specdec_kernels.checks.measure import configurations_of

    shipped = {module: configurations_of(module) for module in MODULES}
    needs_matrix = {c.name: c.needs_matrix for named in shipped.values() for c in named.values()}
    every = [(m, name, t) for m, named in shipped.items() for name in named for t in SHARED_LIMITS]
    jobs = select(every, options.only, options.targets, options.sample)
    rows, errors = measure_all(jobs, options.processes)
    print(format_table(rows))
    measured = Table(importlib.metadata.version("triton"), rows)
    committed = Table.load()
    if options.update and not errors:
        changelog = (
            options.changelog.read_text(encoding="utf-8") if options.changelog.exists() else ""
        )
        committed = updated(measured, committed, needs_matrix, changelog)
        committed.save()
    verdict = compare(measured, committed, needs_matrix, errors)
    for remark in verdict.remarks:
        print(f"note: {remark}")
    for failure in verdict.failures:
        print(f"FAILED {failure}")
    count = f"{len(jobs)} of {len(every)}" if options.part else f"{len(jobs)}"
    print(f"{count} kernels compiled, {len(verdict.failures)} failures")
    return 1 if verdict.failures or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
