"""The CUDA kernels' GPU tests under NVIDIA's compute-sanitizer.

    python -m benchmarks sanitizer [TEST ...] [--tool memcheck ...] [--out FILE]

memcheck finds accesses out of bounds, racecheck races in shared memory, initcheck reads of
uninitialised memory. Each tool runs pytest on every TEST (default: the folders of TESTS), all in
parallel, and must also find the fault in a kernel of sanitizer_controls.cu. Some versions of
racecheck report false races at an mbarrier where one lane arrives for its warp. If racecheck
reports a correct kernel with such a barrier, it is not run on MISREPORTED. Before version 2025.4,
initcheck ignores bulk copies and reports false errors on Hopper. The exit status is 1 unless every
tool finished without findings and all tests passed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine import commands
from benchmarks.engine.results import Entry, Run, start

FAILS = True
TOOLS = ("memcheck", "racecheck", "initcheck")
MISREPORTED = "tests/gpu/layer/hopper"
TESTS = ("tests/gpu/cuda/scan", MISREPORTED, "tests/gpu/layer/portable")
KERNELS = {"initcheck": ("quasar", "at6native")}
"""Parts of the names of the kernels that a tool checks, if not only quasar's. initcheck must see
torch's kernels, which write the inputs."""
HANDSHAKE = "handshake"
LIMIT = 600
"""Seconds after which a process is killed."""
_FOUND = 9  # the exit status for findings; Python never uses it
_SUMMARY = re.compile(
    r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)(?! \w+ were not printed)\b", re.MULTILINE
)


class _Outcome(NamedTuple):
    findings: int | None  # None if the tool printed no summary
    failure: str | None  # the reason if the run has no result
    output: str


def findings_in(output: str) -> int | None:
    """Return the number of errors or hazards in the output's summary; None without a summary."""
    counts = _SUMMARY.findall(output)
    return int(counts[-1]) if counts else None


def run_tool(tool: str, what: str, limit: int) -> _Outcome:
    """Run a test, or a control, under a tool, for at most `limit` seconds."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(_FOUND)]
    for name in KERNELS.get(tool, ("quasar",)):
        command += ["--kernel-name", f"kns={name}"]
    command += ["--print-limit", "20"]
    if what in (*TOOLS, HANDSHAKE):
        command += commands.python("benchmarks.cases.sanitizer", what)
    else:  # pyproject.toml's options require plugins that a GPU machine may lack
        command += commands.python("pytest", "-q", "-o", "addopts=--import-mode=importlib", what)
    # a memory cache would hide accesses beyond a tensor; CUDA graphs need it
    environ = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "QUASAR_GRAPHS": "0", "OMP_NUM_THREADS": "2"}
    output, status = commands.run_for(limit, command, os.environ | environ)
    if status is None:
        return _Outcome(None, f"{what} was cut off after {limit} s", output)
    findings, failure = findings_in(output), None
    if findings is None:
        failure = f"{what} gave no summary"
    elif status not in (0, _FOUND):
        failure = f"{what} ended with status {status}"
    return _Outcome(findings, failure, output)


def watch(tool: str, tests: Sequence[str], limit: int) -> tuple[Entry, str]:
    """Run all tests under a tool in parallel; return the result and the output."""
    began, correct = time.monotonic(), {}
    if tool == "racecheck":
        found = run_tool(tool, HANDSHAKE, limit).findings
        correct = {} if found is None else {HANDSHAKE: found}  # findings in a correct kernel
        tests = [test for test in tests if found == 0 or not test.startswith(MISREPORTED)]
    with ThreadPoolExecutor(len(tests) + 1) as pool:
        planted, *runs = pool.map(lambda what: run_tool(tool, what, limit), (tool, *tests))
    failures = [] if planted.findings else ["a planted fault was not found"]
    figures = {
        "findings": sum(run.findings or 0 for run in runs),
        "faulty": planted.findings or 0,  # in a faulty kernel; must not be 0
        "seconds": time.monotonic() - began,
        **correct,
    }
    failure = "; ".join([*failures, *(run.failure for run in runs if run.failure)]) or None
    texts = {"calls": " ".join(tests)}
    entry = Entry(table="tools", by=tool, figures=figures, texts=texts, failure=failure)
    return entry, "\n".join(run.output for run in (planted, *runs))


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
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or folders of tests/gpu")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one, or these")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"seconds of a process ({LIMIT})")


def measure(args: argparse.Namespace) -> Iterator[Run]:
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    text = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True).stdout
    version = re.search(r"[Vv]ersion (\S+)", text)
    versions = {"compute-sanitizer": version[1] if version else text.strip()}
    wanted, began = args.tool or TOOLS, time.monotonic()
    run = start("sanitizer", "", args.commit, versions=versions)
    run = run.adding(tools=" ".join(wanted))
    with ThreadPoolExecutor(len(wanted)) as pool:  # a tool uses a fraction of the GPU
        running = [pool.submit(watch, tool, args.tests, args.limit) for tool in wanted]
        for done in as_completed(running):
            entry, output = done.result()
            run = run.adding(entry, seconds=time.monotonic() - began)
            if not is_clean(entry):
                print(output, flush=True)
            yield run


def run_control(what: str) -> None:
    """Run a kernel of sanitizer_controls.cu: the fault for a tool, or the correct handshake."""
    import torch

    from quasar_kernels.mount import mount

    mount()
    from fla.ops.quasar.cuda.driver import load_kernels
    from fla.ops.quasar.cuda.nvrtc import compile_cached

    text = Path(__file__).with_name("sanitizer_controls.cu").read_text()
    code = compile_cached("sanitizer_controls", text, {}, torch.cuda.get_device_capability())
    kernel = "quasar_handshake" if what == HANDSHAKE else "quasar_planted"
    values = torch.randn(1056)
    x = values.cuda() if what == HANDSHAKE else torch.empty(64, device="cuda")
    address = ctypes.c_void_p(x.data_ptr())
    number = ctypes.c_int(0 if what == HANDSHAKE else TOOLS.index(what))
    parameters = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(number))
    load_kernels([code], [kernel], 0)[kernel].launch((1, 1), parameters)
    torch.cuda.synchronize()
    if what == HANDSHAKE:
        sums = values[:1024].view(8, 32, 4)[..., 0].sum(0).roll(-5)
        torch.testing.assert_close(x[1024:].cpu(), sums)


if __name__ == "__main__":
    run_control(sys.argv[1])
