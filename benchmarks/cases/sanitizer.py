"""The CUDA kernels below NVIDIA's compute-sanitizer, on a GPU: one command for a developer.

    python -m benchmarks sanitizer [--tool memcheck ...] [--out FILE]

memcheck finds accesses outside of memory, racecheck unordered ones of shared memory, initcheck
reads of what nothing wrote. Each watches the calls of sanitizer_calls.py, and must report the fault
of a faulty kernel. racecheck does not follow an mbarrier at which one lane arrives for its warp,
which is how the layer's kernels hand chunks over: it reports a small right kernel that does only
that. So it watches the operator alone, until that kernel passes. All run in parallel; --limit cuts
off those that take longer. The file is written after each tool. Exit status 1 unless every tool
finished without findings and wrong results.
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
CALLS = ("operator", "layer")
"""Parts of sanitizer_calls.py that the tools watch."""
KERNELS = {"memcheck": ("quasar",), "racecheck": ("quasar",), "initcheck": ("quasar", "at6native")}
"""Parts of the names of kernels that a tool watches. This case does not check torch's kernels, but
initcheck must see them write the inputs of this project's."""
SEES_BULK_COPIES = (2025, 4)
"""The first compute-sanitizer whose initcheck sees bulk copies, by its release notes."""
LIMIT = 110
"""Seconds after which a call is cut off."""
_FOUND = 9  # the exit status for findings, which Python itself never uses
_SUMMARY = re.compile(
    r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)(?! \w+ were not printed)\b", re.MULTILINE
)


class _Outcome(NamedTuple):
    findings: int | None  # None if the tool gave no summary
    failure: str | None  # why the calls have no result
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
    calls = CALLS[:1] if racecheck else CALLS
    todo = (tool, "handshake", *calls) if racecheck else (tool, *calls)
    with ThreadPoolExecutor(len(todo)) as pool:
        runs = dict(
            zip(todo, pool.map(lambda x: run_tool(tool, x, limit, options), todo), strict=True)
        )
    handshake = runs["handshake"].findings if racecheck else None
    if handshake == 0:
        runs["layer"], calls = run_tool(tool, "layer", limit, options), CALLS
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


def misses(run: Run, tools: Sequence[str] = TOOLS) -> list[str]:
    """Return a line for each tool that found something, failed, or did not run."""
    seen = {entry.by: entry for entry in run.table("tools")}
    return [
        f"{tool}: {verdict(seen[tool])}" if tool in seen else f"{tool} was not run"
        for tool in str(run.settings.get("tools", " ".join(tools))).split()
        if tool not in seen or not is_clean(seen[tool])
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """Add this case's options."""
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one, or these")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"seconds for a call; {LIMIT}")


def measure(args: argparse.Namespace) -> Iterator[Run]:
    """Run the tools; yield the run so far after each one."""
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
