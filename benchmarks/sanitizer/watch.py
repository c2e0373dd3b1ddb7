"""Watch the CUDA kernels with NVIDIA's compute-sanitizer, on a GPU: one command for a developer.

    python -m benchmarks.sanitizer.watch [--tool memcheck ...] [--out FILE]

memcheck finds accesses outside of memory, racecheck unordered ones of shared memory, initcheck
reads of what nothing wrote. Each watches calls.py's calls, and must show on a faulty kernel that it
finds such faults here. racecheck does not follow an mbarrier at which one lane
arrives for its warp, which is how the layer's kernels hand chunks over: a small right kernel that
does only that is reported. So it watches the operator alone, until that kernel passes. All run side
by side, and whatever is not over at --limit is cut off. The file is written anew after each tool.
Exit status 1 unless every tool came to its end, without findings and wrong results.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

from benchmarks import results
from benchmarks.engine import commands
from benchmarks.sanitizer.results import TOOLS, SanitizerResults, Watched, verdict

MODULE = "benchmarks.sanitizer.calls"
CALLS = ("operator", "layer")
"""What is watched, by calls.py's names."""
KERNELS = {"memcheck": ("quasar",), "racecheck": ("quasar",), "initcheck": ("quasar", "at6native")}
"""Parts of the names of kernels that a tool watches. torch's are others' to check, but initcheck
must see them write what ours read."""
SEES_BULK_COPIES = (2025, 4)
"""The first compute-sanitizer whose initcheck does, by its release notes."""
LIMIT = 110
"""Seconds after which a call is cut off."""
_FOUND = 9  # our exit status for findings: no other one that a Python process ends with
_SUMMARY = re.compile(
    r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)(?! \w+ were not printed)\b", re.MULTILINE
)


class _Run(NamedTuple):
    findings: int | None  # None: no summary
    failure: str | None  # why it tells nothing of the calls
    said: str


def findings_in(output: str) -> int | None:
    """Return how many errors or hazards the tool's output sums up; None if it came to no end."""
    found = _SUMMARY.findall(output)
    return int(found[-1]) if found else None


def run_tool(tool: str, what: str, limit: int, options: Sequence[str] = ()) -> _Run:
    """Run a part of calls.py below a tool, for so many seconds at most."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND)]
    for name in KERNELS[tool]:
        command += ["--kernel-name", f"kns={name}"]
    command += ["--print-limit", "20"]
    command += commands.python(MODULE, *options, "--limit", limit, what)
    # a cache of memory would hide accesses beyond a tensor and give what was written before
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
    said, status = commands.run_for(limit, command, environ)
    if status is None:
        return _Run(None, f"{what} was cut off after {limit} s", said)
    findings, failure = findings_in(said), None
    if findings is None:
        failure = f"{what} gave no summary"
    elif status not in (0, _FOUND):
        failure = f"{what} ended with status {status}"
    return _Run(findings, failure, said)


def call_options(tool: str, used: str) -> tuple[str, ...]:
    """Return calls.py's options below a tool of a version like 2025.3.1.0."""
    number = tuple(int(part) for part in used.split(".")[:2] if part.isdigit())
    return ("--clear",) if tool == "initcheck" and number < SEES_BULK_COPIES else ()


def watch(tool: str, limit: int, options: Sequence[str] = ()) -> tuple[Watched, str]:
    """Let a tool watch everything side by side; return the result and what was said."""
    began = time.monotonic()
    racecheck = tool == "racecheck"
    calls = CALLS[:1] if racecheck else CALLS
    todo = (tool, "handshake", *calls) if racecheck else (tool, *calls)
    with ThreadPoolExecutor(len(todo)) as pool:
        runs = dict(
            zip(todo, pool.map(lambda x: run_tool(tool, x, limit, options), todo), strict=True)
        )
    handshake = runs.get("handshake")
    if handshake and handshake.findings == 0:
        runs["layer"], calls = run_tool(tool, "layer", limit, options), CALLS
    faulty = runs[tool].findings or 0
    failures = [] if faulty else ["a planted fault was not found"]
    failures += [run.failure for what, run in runs.items() if run.failure and what != tool]
    found = Watched(
        calls=calls,
        seconds=time.monotonic() - began,
        findings=sum(runs[call].findings or 0 for call in calls),
        failure="; ".join(failures) or None,
        faulty=faulty,
        handshake=handshake.findings if handshake else None,
    )
    return found, "\n".join(run.said for run in runs.values())


def main() -> int:
    """Run the tools, write the file when asked to, and return the exit status."""
    parser = commands.options(__doc__, writes=False)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one, or these")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"seconds for a call; {LIMIT}")
    args = parser.parse_args()
    used = commands.tool_version("compute-sanitizer", "the CUDA toolkit")
    wanted, began = args.tool or TOOLS, time.monotonic()
    tools: dict[str, Watched] = {}
    with ThreadPoolExecutor(len(wanted)) as pool:  # a tool takes a fraction of the GPU
        running = {
            pool.submit(watch, tool, args.limit, call_options(tool, used)): tool for tool in wanted
        }
        run = describe_run(used, args.commit) if args.out else None
        for done in as_completed(running):
            tool = running[done]
            tools[tool], said = done.result()
            seconds = tools[tool].seconds
            print(f"{tool}: {verdict(tools[tool])} ({seconds:.0f} s)", flush=True)
            if not tools[tool].clean:
                print(said, flush=True)
            if run:
                ordered = {tool: tools[tool] for tool in TOOLS if tool in tools}
                over = {"tools": ordered, "seconds": time.monotonic() - began}
                results.write(args.out, run.model_copy(update=over))
    return int(not all(one.clean for one in tools.values()))


def describe_run(used: str, commit: str | None) -> SanitizerResults:
    """Return the results before any tool is over; torch tells of the GPU, so it is imported."""
    from benchmarks.sanitizer.calls import CASES

    return SanitizerResults(
        **results.origin(commit),
        sanitizer=used,
        seconds=0,
        calls={name: len(cases) for name, (_, cases) in CASES.items()},
        tools={},
    )


if __name__ == "__main__":
    sys.exit(main())
