"""Watch the CUDA kernels with NVIDIA's compute-sanitizer, on a GPU: one command for a developer.

    python scripts/sanitize_kernels.py [--tool memcheck ...] [--out benchmarks/h200/sanitizer.json]

memcheck finds accesses outside of memory, racecheck unordered ones of shared memory, initcheck
reads of what nothing wrote. Each watches sanitized_calls.py's calls, and must show on a faulty
kernel that it finds such faults here. racecheck does not follow an mbarrier at which one lane
arrives for its warp, which is how the layer's kernels hand chunks over: a small right kernel that
does only that is reported. So it watches the operator alone, until that kernel passes. Exit status
1 on findings or wrong results.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from measuring import results
from measuring.sanitizer_results import TOOLS, SanitizerResults, Watched

SCRIPT = Path(__file__).with_name("sanitized_calls.py")
CALLS = ("operator", "layer")
"""What is watched, by sanitized_calls.py's names."""
_FOUND = 9  # our exit status for findings: no other one that a Python process ends with
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)


class SanitizerError(Exception):
    """The tool did not run, or the calls failed in a way that is no finding."""


def findings_in(output: str) -> int:
    """Return how many errors or hazards the tool's output sums up.

    Raises:
        SanitizerError: there is no summary, so the tool did not come to its end.
    """
    found = _SUMMARY.findall(output)
    if not found:
        raise SanitizerError(f"compute-sanitizer gave no summary:\n{output[-2000:]}")
    return int(found[-1])


class _Run(NamedTuple):
    status: int
    findings: int
    said: str


def run_tool(tool: str, *what: str) -> _Run:
    """Run parts of sanitized_calls.py below a tool.

    Raises:
        SanitizerError: as `findings_in`.
    """
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND)]
    # torch's own kernels and libraries are others' to check
    command += ["--kernel-name", "kns=quasar", "--print-limit", "20"]
    # a cache of memory would hide accesses beyond a tensor and give what was written before
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT), *what],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return _Run(done.returncode, findings_in(done.stdout), done.stdout)


def watch(tool: str) -> tuple[Watched, str]:
    """Let a tool watch everything side by side; return the result and what was said of the calls.

    Raises:
        SanitizerError: a fault was not found, or a call went wrong.
    """
    with ThreadPoolExecutor(3) as pool:
        faulty = pool.submit(run_tool, tool, tool)
        handshake = pool.submit(run_tool, tool, "handshake") if tool == "racecheck" else None
        calls = CALLS[:1] if handshake else CALLS
        run = run_tool(tool, *calls)
    if not faulty.result().findings:
        said = faulty.result().said[-2000:]
        raise SanitizerError(f"{tool} does not find a planted fault here:\n{said}")
    if handshake and not handshake.result().findings:
        calls, run = CALLS, run_tool(tool, *CALLS)
    if run.status not in (0, _FOUND):
        message = f"{tool}: the calls ended with status {run.status}:\n{run.said[-2000:]}"
        raise SanitizerError(message)
    found = Watched(
        calls=calls,
        findings=run.findings,
        faulty=faulty.result().findings,
        handshake=handshake.result().findings if handshake else None,
    )
    return found, run.said


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
    tools, failed = {}, False
    with ThreadPoolExecutor(len(wanted)) as pool:  # a tool takes a fraction of the GPU
        for tool, seen in [(tool, pool.submit(watch, tool)) for tool in wanted]:
            try:
                tools[tool], said = seen.result()
            except SanitizerError as error:
                print(error, flush=True)
                failed = True
                continue
            print(f"{tool}: {tools[tool].findings} findings", flush=True)
            if tools[tool].findings:
                print(said)
    if failed:
        return 1
    if args.out:
        write(args.out, used, tools, args.commit)
    return int(any(one.findings for one in tools.values()))


def write(path: Path, used: str, tools: dict[str, Watched], commit: str | None) -> None:
    """Write the results; torch, which tells of the GPU, is imported here and not before."""
    import sanitized_calls
    import torch

    from harness.environment import describe

    run = SanitizerResults(
        created=datetime.now(timezone.utc).date(),
        commit=commit or results.project_commit(),
        environment=describe(torch.device("cuda")),
        sanitizer=used,
        calls={name: len(cases) for name, (_, cases) in sanitized_calls.CASES.items()},
        tools=tools,
    )
    results.write(path, run)


if __name__ == "__main__":
    sys.exit(main())
