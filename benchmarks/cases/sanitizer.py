"""The CUDA kernels under NVIDIA's compute-sanitizer, on a GPU.

    python -m benchmarks sanitizer [--tool memcheck ...] [--out FILE]

memcheck finds accesses out of bounds, racecheck races in shared memory, initcheck reads of
uninitialised memory. Each tool checks the calls of sanitizer_calls.py, and must also find the
planted fault of a faulty kernel. Some versions of racecheck misreport an mbarrier at which one lane
arrives for its warp, as in the kernels of the layer and of the wide projection. So racecheck first
checks a small correct kernel with such a barrier, and omits these two if it reports that kernel.
All calls run in parallel; --limit kills those that take longer. The file is written after each
tool. The exit status is 1 unless every tool finished without findings or wrong results.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

from benchmarks.cases.sanitizer_calls import CASES, TOOLS
from benchmarks.engine import commands
from benchmarks.engine.results import Entry, Run, start

FAILS = True
MODULE = "benchmarks.cases.sanitizer_calls"
MISREPORTED = ("layer", "wide")
"""Parts of sanitizer_calls.py that racecheck omits if it reports the correct kernel."""
KERNELS = {"memcheck": ("quasar",), "racecheck": ("quasar",), "initcheck": ("quasar", "at6native")}
"""Parts of the names of the kernels that a tool checks. initcheck must also see torch's kernels,
which write the inputs."""
SEES_BULK_COPIES = (2025, 4)
"""First version of compute-sanitizer in which initcheck sees bulk copies, by its release notes."""
LIMIT = 110
"""Seconds after which a call is killed."""
_FOUND = 9  # the exit status for findings; Python never uses it
_SUMMARY = re.compile(
    r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)(?! \w+ were not printed)\b", re.MULTILINE
)


class _Outcome(NamedTuple):
    findings: int | None  # None if the tool printed no summary
    failure: str | None  # the reason if the calls have no result
    output: str


def findings_in(output: str) -> int | None:
    """Return the number of errors or hazards in the output's summary; None without a summary."""
    counts = _SUMMARY.findall(output)
    return int(counts[-1]) if counts else None


def run_tool(tool: str, what: str, limit: int, options: Sequence[str] = ()) -> _Outcome:
    """Run a part of sanitizer_calls.py under a tool, for at most `limit` seconds."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND)]
    for name in KERNELS[tool]:
        command += ["--kernel-name", f"kns={name}"]
    command += ["--print-limit", "20"]
    command += commands.python(MODULE, *options, "--limit", limit, what)
    # a memory cache would hide accesses beyond a tensor and reuse initialised memory
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
    output, status = commands.run_for(limit, command, environ)
    if status is None:
        return _Outcome(None, f"{what} was cut off after {limit} s", output)
    findings, failure = findings_in(output), None
    if findings is None:
        failure = f"{what} gave no summary"
    elif status not in (0, _FOUND):
        failure = f"{what} ended with status {status}"
    return _Outcome(findings, failure, output)


def call_options(tool: str, used: str) -> tuple[str, ...]:
    """Return a tool's options of sanitizer_calls.py; `used` is its version, such as 2025.3.1.0."""
    number = tuple(int(part) for part in used.split(".")[:2] if part.isdigit())
    return ("--clear",) if tool == "initcheck" and number < SEES_BULK_COPIES else ()


def watch(tool: str, limit: int, options: Sequence[str] = ()) -> tuple[Entry, str]:
    """Run all parts under a tool in parallel; return the result and the output."""
    began = time.monotonic()
    racecheck = tool == "racecheck"
    calls = [part for part in CASES if not (racecheck and part in MISREPORTED)]
    todo = (tool, "handshake", *calls) if racecheck else (tool, *calls)
    with ThreadPoolExecutor(len(todo)) as pool:
        runs = dict(
            zip(todo, pool.map(lambda x: run_tool(tool, x, limit, options), todo), strict=True)
        )
    handshake = runs["handshake"].findings if racecheck else None
    if handshake == 0:
        calls = list(CASES)
        runs |= {what: run_tool(tool, what, limit, options) for what in MISREPORTED}
    faulty = runs[tool].findings or 0
    failures = [] if faulty else ["a planted fault was not found"]
    failures += [run.failure for what, run in runs.items() if run.failure and what != tool]
    findings = {
        "findings": sum(runs[call].findings or 0 for call in calls),
        "faulty": faulty,  # findings in a faulty kernel; must not be 0
        "seconds": time.monotonic() - began,
        **({} if handshake is None else {"handshake": handshake}),  # in a correct kernel
    }
    entry = Entry(
        table="tools",
        by=tool,
        figures=findings,
        texts={"calls": " ".join(calls)},
        failure="; ".join(failures) or None,
    )
    return entry, "\n".join(run.output for run in runs.values())


def verdict(entry: Entry) -> str:
    """Return a tool's findings as text; an unfinished run never counts as 0 findings."""
    count = f"{entry.figures['findings']} findings"
    if entry.failure is None:
        return count
    return f"{count}; {entry.failure}" if entry.figures["findings"] else entry.failure


def is_clean(entry: Entry) -> bool:
    """Return whether a tool finished, can find faults, and found none."""
    return not entry.figures["findings"] and entry.failure is None


def misses(run: Run) -> list[str]:
    """Return a line for each tool that found something, failed, or did not run."""
    seen = {entry.by: entry for entry in run.table("tools")}
    return [
        f"{tool}: {verdict(seen[tool])}" if tool in seen else f"{tool} was not run"
        for tool in str(run.settings.get("tools", " ".join(TOOLS))).split()
        if tool not in seen or not is_clean(seen[tool])
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one, or these")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"seconds for a call; {LIMIT}")


def measure(args: argparse.Namespace) -> Iterator[Run]:
    used = commands.tool_version("compute-sanitizer", "the CUDA toolkit")
    wanted, began = args.tool or TOOLS, time.monotonic()
    counts = {f"{name} calls": len(cases) for name, (_, cases) in CASES.items()}
    versions = {"compute-sanitizer": used}
    run = start("sanitizer", "", args.commit, versions=versions, settings=counts)
    if args.tool:
        run = run.adding(tools=" ".join(args.tool))
    with ThreadPoolExecutor(len(wanted)) as pool:  # a tool uses a fraction of the GPU
        running = [
            pool.submit(watch, tool, args.limit, call_options(tool, used)) for tool in wanted
        ]
        for done in as_completed(running):
            entry, output = done.result()
            if not is_clean(entry):
                print(output, flush=True)
            run = run.adding(entry, seconds=time.monotonic() - began)
            yield run
