"""Compile every kernel for every supported GPU, on a machine that has none.

    python -m benchmarks.resources.compile [--arch 90 ... | --quick] [--match TEXT]
        [--check | --write]

Triton kernels are compiled as quasar_kernels/compile_specs.py and the specs of the blocks describe
them, each .cu file by nvcc (the wheels of the `dev` extra, else the one on PATH), for the target
that NVRTC uses at run time. A .cu file may hold kernels for some GPUs only. --check compares
registers, stack, spills and shared memory with the committed table; --write writes the table. The
exit status is 1 if something does not compile, needs more shared memory than
a GPU has (for Triton's kernels: than the smallest GPU has), or differs from the table with --check.

--quick omits GPUs if their code differs little from that of another one (see `is_quick`).

A result is stored in the user's cache folder by a digest of the kernel's sources, its spec, the
compilers' versions and this program (cache.py), so that an unchanged kernel is compiled once.
--no-cache compiles all kernels and stores no result.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import triton

from benchmarks.resources import cache
from benchmarks.resources import table as kernel_resources
from benchmarks.resources.cubin import output, resource_usage
from benchmarks.resources.table import NO_KERNEL, ROWS, Compiled, Resources, Table
from quasar_kernels.arguments import Parser
from quasar_kernels.blocks.triton_segments.specs import block_specs
from quasar_kernels.compile_failures import explain
from quasar_kernels.compile_specs import (
    ARCHITECTURES,
    CompileSpec,
    ast_source,
    compile_spec,
    compile_specs,
)
from quasar_kernels.contract import OVERLAY
from quasar_kernels.delta_rule.kda_triton.specs import kda_specs
from quasar_kernels.mount import mount

SHARED_LIMIT = 99 * 1024
"""Bytes of shared memory that a block may have on sm_86, 89 and 120 (CUDA C++ Programming Guide).

This is the limit of the Triton kernels on every GPU, so that the same tiles run on all of them.
"""

SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The same for other GPUs. .cu files may use it, because their needs may depend on the GPU."""


PACKAGE = OVERLAY.parent
"""The folder of the kernels' package, with all .cu files."""

RESERVED = 1024
"""Bytes of shared memory that the system reserves for each block from Hopper on.

cuobjdump counts them."""

NVCC_OPTIONS = ("-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v", "--cubin")


def find_nvcc() -> Path | None:
    """Return the nvcc of the installed wheels, else the one on PATH, else None."""
    wheels = find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        compilers = sorted(Path(folder).glob("cu*/bin/nvcc"))
        if compilers:
            return compilers[-1]
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else None


def spilled_bytes(log: str) -> dict[str, int]:
    """Return the bytes of spill stores and loads of each function in the output of `ptxas -v`."""
    rows = re.findall(
        r"Function properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads",
        log,
    )
    return {name: int(stores) + int(loads) for name, stores, loads in rows}


def compile_triton(spec: CompileSpec, arch: int) -> list[Compiled]:
    knobs, log = triton.knobs, io.StringIO()
    with contextlib.redirect_stdout(log), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # ptxas logs nothing for a cached kernel
        binary = compile_spec(spec, arch)
    name = binary.metadata.name
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(binary.asm["cubin"])
        registers, stack, *_ = resource_usage(cubin)[name]
    spills = spilled_bytes(log.getvalue())[name]
    needs = Resources(registers, stack, spills, binary.metadata.shared)
    return [_fitted(spec.name, arch, needs, SHARED_LIMIT)]


def compile_cuda(source: Path, nvcc: Path, arch: int) -> list[Compiled]:
    """Compile one .cu file for one architecture; return a result per kernel, or one skipped."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        target = "sm_90a" if arch == 90 else f"sm_{arch}"  # as at run time; only 90a has wgmma
        log = output([str(nvcc), *NVCC_OPTIONS, f"-arch={target}", str(source), "-o", str(cubin)])
        usage, spills = resource_usage(cubin), spilled_bytes(log)
    rows = []
    limit = SHARED_LIMITS.get(arch, SHARED_LIMIT) + (RESERVED if arch >= 90 else 0)
    for name, of in sorted(usage.items()):
        needs = Resources(of.registers, of.stack, spills[name], of.static + of.dynamic)
        rows.append(_fitted(f"{source.name}: {name}", arch, needs, limit))
    return rows or [Compiled(source.name, arch)]


def specs_for(arch: int) -> list[CompileSpec]:
    """Return every Triton kernel of the project, with the tiles for a GPU."""
    return [*compile_specs(arch), *block_specs(arch), *kda_specs(arch)]


def sources() -> list[Path]:
    """Return every .cu file of the kernels' package."""
    return sorted(PACKAGE.rglob("*.cu"))


def is_quick(name: str, arch: int) -> bool:
    """Return whether --quick compiles a kernel, or a .cu file, for an architecture.

    sm_90 gets all kernels. The .cu files have the same code for all others: sm_86 has the
    instructions of sm_80 and the shared memory of sm_120. Triton has three code generators, for
    sm_90, for sm_100, and for all others. Its kernels in bf16 get one more architecture: those of
    the blocks sm_80, those for heads of 128 sm_120, which has the least shared memory, and the
    others sm_100.
    """
    if arch == 90:
        return True
    if ".cu" in name:
        return arch == 86
    if "fp32" in name or name == "forward_substitution":
        return False
    if name.startswith(("wkv6", "ssd")):
        return arch == 80
    return arch == (120 if "S=128" in name else 100)


@dataclass(frozen=True)
class _Job:
    """One compilation: `parts` gives all that its result depends on."""

    name: str
    arch: int
    compile: Callable[[], list[Compiled]]
    parts: Callable[[], list[str]]


def compile_all(
    archs: Sequence[int], match: str = "", *, quick: bool = False, keep: bool = False
) -> list[Compiled]:
    """Compile every kernel with `match` in its name or file name, over all cores.

    Args:
        quick: whether to compile only for the architectures that `is_quick` selects.
        keep: whether to use cached results with equal dependencies, and to cache new results.
    """
    mount()
    nvcc = find_nvcc()
    jobs: list[_Job] = []
    for source in sources():  # first, because each takes long
        if nvcc is None:
            raise SystemExit(f"{source.name}: nvcc was not found; install the project's dev extra")
        for arch in archs:
            run = partial(compile_cuda, source, nvcc, arch)
            jobs.append(_Job(source.name, arch, run, partial(_cuda_parts, source)))
    for arch in archs:
        for spec in specs_for(arch):
            run = partial(compile_triton, spec, arch)
            jobs.append(_Job(spec.name, arch, run, partial(_triton_parts, spec)))
    _jobs[:] = [
        job
        for job in jobs
        if match in job.name and not (quick and not is_quick(job.name, job.arch))
    ]
    _tools[:] = []
    if keep:
        versions = kernel_resources.compiler_versions(nvcc)
        _tools[:] = [str(sorted(versions.items())), *_packages(), *_own_sources()]
        cache.delete_old()
    # forked workers inherit torch, Triton and the jobs; jitted functions cannot be pickled
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        return [row for results in pool.map(_run, range(len(_jobs))) for row in results]


_jobs: list[_Job] = []
_tools: list[str] = []
"""Texts on which every result depends; empty if no result is stored."""


def _run(index: int) -> list[Compiled]:
    job = _jobs[index]
    try:
        return _kept(job) if _tools else job.compile()
    except Exception as error:
        # compilers raise any type of exception, and one bad kernel must not hide the others
        return [Compiled(job.name, job.arch, error=f"{type(error).__name__}: {error}")]


def _kept(job: _Job) -> list[Compiled]:
    """Return a job's cached result, or compile; failures are not cached."""
    name = cache.digest([*_tools, job.name, str(job.arch), *job.parts()]) + ".json"

    def make(file: Path) -> None:
        file.write_bytes(ROWS.dump_json(job.compile()))

    def load() -> list[Compiled]:
        path = cache.entry(name, make)
        try:
            rows = ROWS.validate_json(path.read_bytes())
        except ValueError:  # it is damaged
            rows = []
        if not rows or any(row.error for row in rows):
            path.unlink(missing_ok=True)
        return rows

    try:
        return load() or load()
    except OSError:  # the folder cannot be written
        return job.compile()


def _triton_parts(spec: CompileSpec) -> list[str]:
    launch = (spec.num_warps, spec.num_stages)
    return [ast_source(spec).hash(), str(launch)]  # the hash covers all functions that it calls


def _cuda_parts(source: Path) -> list[str]:
    """Return the texts of a .cu file and of all files of this project that it includes."""
    texts: dict[Path, str] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop().resolve()
        if path not in texts and path.is_file():
            texts[path] = path.read_text()
            names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', texts[path], re.M)
            waiting += [path.parent / name for name in names]
    return [text for path in sorted(texts) for text in (path.name, texts[path])]


def _packages() -> list[str]:
    """Return the versions of CUDA's packages, and of the host compiler that nvcc calls."""
    packages = [f"{x.name} {x.version}" for x in distributions() if x.name.startswith("nvidia-")]
    host = shutil.which("g++")
    return [*sorted(packages), output([host, "--version"]) if host else ""]


def _own_sources() -> list[str]:
    return [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]


def _fitted(kernel: str, arch: int, needs: Resources, limit: int) -> Compiled:
    error = f"{needs.shared} bytes of shared memory; a block may have {limit}"
    return Compiled(kernel, arch, needs, error if needs.shared > limit else "")


def _lines(rows: Sequence[Compiled]) -> str:
    width = max(len(row.kernel) for row in rows)
    lines = [f"{'kernel':{width}}  sm_  registers  stack B  spills B  shared B"]
    for r in rows:
        n = r.needs or Resources()
        lines.append(
            f"{r.kernel:{width}}  {r.arch:3}  {n.registers:9}  {n.stack:7}  {n.spills:8}  "
            f"{n.shared:8}  {r.error or ('' if r.needs else NO_KERNEL)}".rstrip()
        )
    return "\n".join(lines)


def check(table: Table, archs: Sequence[int], match: str, quick: bool) -> bool:
    """Compare with the committed table; print the differences and the remedy."""
    kept = kernel_resources.load(kernel_resources.TABLE.read_text())
    expected = {
        (name, arch): needs
        for (name, arch), needs in kept.rows.items()
        if arch in archs and match in name and not (quick and not is_quick(name, arch))
    }
    wrong, notes = kernel_resources.compare(replace(kept, rows=expected), table)
    for line in notes:
        print(f"note: {line}")
    if not wrong:
        return True
    print(f"{kernel_resources.TABLE.name} differs from the kernels' needs:")
    print("\n".join(f"  {line}" for line in wrong))
    print(f"If this is intended, update and commit the table: {kernel_resources.WRITE}")
    return False


def main() -> int:
    """Compile, print the table, check or write it, and return the exit status."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES)
    part.add_argument("--quick", action="store_true", help="omit similar GPUs, as CI does")
    parser.add_argument("--match", default="", help="only kernels with this text in their name")
    parser.add_argument("--no-cache", action="store_true", help="compile what was compiled before")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help="compare with the committed table")
    either.add_argument("--write", action="store_true", help="write the table")
    args = parser.parse_args()
    if args.write and (args.arch or args.quick or args.match):
        parser.error("--write needs every kernel on every architecture")
    archs = args.arch or ARCHITECTURES
    rows = compile_all(archs, args.match, quick=args.quick, keep=not args.no_cache)
    if not rows:
        parser.error(f"no kernel's name contains {args.match!r}")
    print(_lines(rows))
    failed = sum(bool(row.error) for row in rows)
    for row in rows:
        known = explain(row.error)
        if known is not None:
            print(f"{row.kernel}, sm_{row.arch}: {known.cause}. {known.remedy}")
    print(f"{len(rows)} compilations, {failed} failed")
    if failed:
        return 1
    table = kernel_resources.make_table(rows, kernel_resources.compiler_versions(find_nvcc()))
    if args.write:
        kernel_resources.TABLE.write_text(kernel_resources.dump(table))
    return 0 if not args.check or check(table, archs, args.match, args.quick) else 1


if __name__ == "__main__":
    sys.exit(main())
