"""Watch the CUDA kernels with NVIDIA's compute-sanitizer, on a GPU: one command for a developer.

    python scripts/sanitize_kernels.py [--tool memcheck ...] [--out benchmarks/h200/sanitizer.json]

memcheck finds accesses outside of memory, racecheck unordered ones of shared memory, initcheck
reads of what nothing wrote. Each watches sanitized_calls.py's calls, after it has shown on a
planted fault that it finds such faults here. Exit status 1 on findings or wrong results.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Literal

from operator_results import Frozen
from pydantic import Field

from harness.report import Environment

CALLS = Path(__file__).with_name("sanitized_calls.py")
TOOLS = ("memcheck", "racecheck", "initcheck")
"""compute-sanitizer's tools that are used."""

_FOUND = 9  # our exit status for findings: no other one that a Python process ends with
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)


class Watched(Frozen):
    """What one tool saw."""

    findings: int = Field(ge=0, description="errors or hazards; 0 is clean")
    planted: int = Field(ge=1, description="what it found in a faulty kernel, as it must")


class SanitizerResults(Frozen):
    """A whole run on one GPU."""

    schema_version: Literal[1] = 1
    created: date
    commit: str | None
    environment: Environment
    sanitizer: str = Field(description="compute-sanitizer's version")
    calls: int = Field(ge=1, description="that were watched and compared with float64")
    tools: dict[str, Watched]


class SanitizerError(Exception):
    """The tool did not run, or the calls failed in a way that is no finding."""


def load(path: Path) -> SanitizerResults:
    """Read a run's file; pydantic.ValidationError when it is not one."""
    return SanitizerResults.model_validate_json(path.read_text(encoding="utf-8"))


def misses(results: SanitizerResults) -> list[str]:
    """Name every tool that found something, or did not run."""
    seen = {tool: results.tools.get(tool) for tool in TOOLS}
    return [
        f"{tool} was not run" if one is None else f"{tool}: {one.findings} findings"
        for tool, one in seen.items()
        if one is None or one.findings
    ]


def findings_in(output: str) -> int:
    """Return how many errors or hazards the tool's output sums up.

    Raises:
        SanitizerError: there is no summary, so the tool did not come to its end.
    """
    found = _SUMMARY.findall(output)
    if not found:
        raise SanitizerError(f"compute-sanitizer gave no summary:\n{output[-2000:]}")
    return int(found[-1])


def run_tool(tool: str, command: Sequence[str]) -> tuple[int, int, str]:
    """Run a command below a tool, and return its exit status, the findings and what was said."""
    watched = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND)]
    # torch's own kernels and libraries are others' to check
    watched += ["--kernel-name", "kns=quasar", "--print-limit", "20", *command]
    # a cache of memory would hide accesses beyond a tensor and give what was written before
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        watched,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, findings_in(done.stdout), done.stdout


def watch(tool: str) -> tuple[Watched, str]:
    """Let a tool prove itself, then watch the calls; return the result and what was said.

    Raises:
        SanitizerError: a planted fault was not found, or a call went wrong.
    """
    calls = [sys.executable, str(CALLS)]
    _, planted, said = run_tool(tool, [*calls, "--planted", tool])
    if not planted:
        raise SanitizerError(f"{tool} does not find a planted fault here:\n{said[-2000:]}")
    status, findings, said = run_tool(tool, calls)
    if status not in (0, _FOUND):
        raise SanitizerError(f"{tool}: the calls ended with status {status}:\n{said[-2000:]}")
    return Watched(findings=findings, planted=planted), said


def version() -> str:
    """Return compute-sanitizer's version."""
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    said = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True)
    found = re.search(r"[Vv]ersion (\S+)", said.stdout)
    return found[1] if found else said.stdout.strip()


def main() -> int:
    """Run the tools, write the file when asked to, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one, or these")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--commit", help="this project's commit, where git cannot tell")
    args = parser.parse_args()
    used, wanted = version(), args.tool or TOOLS
    with ThreadPoolExecutor(len(wanted)) as pool:  # a tool takes a fraction of the GPU
        watching = {tool: pool.submit(watch, tool) for tool in wanted}
    tools = {}
    for tool, seen in watching.items():
        try:
            tools[tool], said = seen.result()
        except SanitizerError as error:
            print(error)
            return 1
        print(f"{tool}: {tools[tool].findings} findings")
        if tools[tool].findings:
            print(said)
    if args.out:
        write(args.out, used, tools, args.commit)
    return int(any(one.findings for one in tools.values()))


def write(path: Path, used: str, tools: dict[str, Watched], commit: str | None) -> None:
    """Write the results; torch, which tells of the GPU, is imported here and not before."""
    import sanitized_calls
    import torch
    from benchmark_fork import project_commit

    from harness.environment import describe

    results = SanitizerResults(
        created=datetime.now(timezone.utc).date(),
        commit=commit or project_commit(),
        environment=describe(torch.device("cuda")),
        sanitizer=used,
        calls=sum(len(cases) for _, cases in sanitized_calls.CASES),
        tools=tools,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
