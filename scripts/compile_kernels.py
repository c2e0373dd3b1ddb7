"""Compile every kernel of the overlay for every supported GPU, on a machine that has none.

    python scripts/compile_kernels.py [--all] [--arch 90 ...] [--match TEXT] [--json FILE]

Triton kernels are compiled as quasar_kernels/compile_specs.py describes them, each .cu file by nvcc
(the wheels of the `dev` extra, else the one on PATH). Registers and stack are read from the machine
code. Exit status 1 when something does not compile, or asks for more shared memory than one
block may have; TRITON_CACHE_DIR keeps the results of Triton between runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import triton

from quasar_kernels.compile_specs import ARCHITECTURES, CompileSpec, compile_spec, compile_specs
from quasar_kernels.contract import OVERLAY
from quasar_kernels.mount import mount

SHARED_LIMIT_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one block may have, by compute capability (CUDA C++ Programming Guide)."""

NVCC_OPTIONS = ("-std=c++17", "-O3", "-lineinfo", "--cubin")


@dataclass(frozen=True)
class Compiled:
    """What one kernel needs on one architecture; `error` is empty when it compiled and fits.

    `shared` is in bytes a block (for a .cu file the static part), `stack` in bytes a thread: where
    it is not 0, registers are spilled or an array is indexed at run time.
    """

    kernel: str
    arch: int
    registers: int = 0
    stack: int = 0
    shared: int = 0
    error: str = ""


def find_nvcc() -> Path | None:
    """Return the nvcc of the installed wheels, else the one on PATH, else None."""
    wheels = find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        found = sorted(Path(folder).glob("cu*/bin/nvcc"))
        if found:
            return found[-1]
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else None


def resource_usage(cubin: Path) -> dict[str, tuple[int, int, int]]:
    """Return registers, stack and static shared memory of each kernel in a cubin, by its name."""
    tool = triton.knobs.nvidia.cuobjdump.path
    text = _output([tool, "--dump-resource-usage", str(cubin)])
    rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    return {name: (int(reg), int(stack), int(shared)) for name, reg, stack, shared in rows}


def compile_triton(spec: CompileSpec, arch: int) -> list[Compiled]:
    """Compile one spec for one architecture."""
    binary = compile_spec(spec, arch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(binary.asm["cubin"])
        registers, stack, _ = resource_usage(cubin)[binary.metadata.name]
    return [_fitted(spec.name, arch, registers, stack, binary.metadata.shared)]


def compile_cuda(source: Path, nvcc: Path, arch: int) -> list[Compiled]:
    """Compile one .cu file for one architecture; one result for each kernel in it."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        _output([str(nvcc), *NVCC_OPTIONS, f"-arch=sm_{arch}", str(source), "-o", str(cubin)])
        usage = resource_usage(cubin)
    return [_fitted(f"{source.name}: {name}", arch, *usage[name]) for name in sorted(usage)]


def compile_all(archs: Sequence[int], match: str = "") -> list[Compiled]:
    """Compile every kernel whose name, or file name, contains `match`, over all cores."""
    mount()
    jobs: list[tuple[str, int, Callable[[], list[Compiled]]]] = []
    for spec in compile_specs():
        jobs += [(spec.name, arch, partial(compile_triton, spec, arch)) for arch in archs]
    nvcc = find_nvcc()
    for source in sorted(OVERLAY.rglob("*.cu")):
        if nvcc is None:
            raise SystemExit(f"{source.name}: nvcc was not found; install the project's dev extra")
        jobs += [(source.name, arch, partial(compile_cuda, source, nvcc, arch)) for arch in archs]
    _jobs[:] = [job for job in jobs if match in job[0]]
    # forked workers inherit torch, Triton and the jobs; jitted functions cannot be pickled
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        return [row for rows in pool.map(_run, range(len(_jobs))) for row in rows]


_jobs: list[tuple[str, int, Callable[[], list[Compiled]]]] = []


def _run(index: int) -> list[Compiled]:
    name, arch, job = _jobs[index]
    try:
        return job() or [Compiled(name, arch, error="holds no kernel")]
    except Exception as error:
        # compilers raise what they like; one bad kernel must not hide the others
        return [Compiled(name, arch, error=f"{type(error).__name__}: {error}")]


def _fitted(kernel: str, arch: int, registers: int, stack: int, shared: int) -> Compiled:
    limit = SHARED_LIMIT_KIB[arch] * 1024
    error = f"{shared} bytes of shared memory; a block has {limit}" if shared > limit else ""
    return Compiled(kernel, arch, registers, stack, shared, error)


def _output(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if run.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed:\n{run.stderr or run.stdout}")
    return run.stdout


def _table(rows: Sequence[Compiled]) -> str:
    width = max(len(row.kernel) for row in rows)
    lines = [f"{'kernel':{width}}  sm_  registers  stack B  shared B"]
    for r in rows:
        lines.append(
            f"{r.kernel:{width}}  {r.arch:3}  {r.registers:9}  {r.stack:7}  {r.shared:8}"
            + (f"  {r.error}" if r.error else "")
        )
    return "\n".join(lines)


def main() -> int:
    """Compile, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_LIMIT_KIB))
    parser.add_argument("--all", action="store_true", help="Blackwell too")
    parser.add_argument("--match", default="", help="only kernels whose name contains this text")
    parser.add_argument("--json", type=Path, help="write the table there as JSON")
    args = parser.parse_args()
    archs = args.arch or (sorted(SHARED_LIMIT_KIB) if args.all else ARCHITECTURES)
    rows = compile_all(archs, args.match)
    if not rows:
        parser.error(f"no kernel's name contains {args.match!r}")
    print(_table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    failed = sum(bool(row.error) for row in rows)
    print(f"{len(rows)} compilations, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
