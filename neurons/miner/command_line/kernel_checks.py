"""The checks of `doctor --kernels`: NVRTC, the implementation that runs, compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from harness.measuring.runner import MeasurementError, Options, call
from neurons.miner.command_line.machine_checks import Finding, failure, gpu, ok, warning
from quasar_kernels.compile_failures import explain
from quasar_kernels.compile_specs import ARCHITECTURES
from quasar_kernels.diagnosis import TOLERANCE, Build, Builds, PathsTaken, PathTaken

CAPABILITIES = tuple(divmod(arch, 10) for arch in ARCHITECTURES)
"""(major, minor) of every compute capability for which the kernels are compiled."""

OLDEST = (8, 0)
"""The CUDA kernels are written for this capability and later ones."""

MAX_PROCESSES = 3
"""Number of capabilities compiled at a time: each process loads torch, half a gigabyte."""

_UNKNOWN = "Report this line: its cause is unknown."


def compile_kernels(capability: tuple[int, int]) -> Builds:
    """Compile the CUDA kernels for (major, minor) as at first use; this needs no such GPU.

    Raises a MeasurementError if the process failed or timed out.
    """
    function = "quasar_kernels.diagnosis:compile_for"
    return Builds.model_validate(call(function, *capability, options=Options("cpu", 120.0)))


def find_paths(device: str) -> PathsTaken:
    """Run the operator on every GPU (`cuda`) or on the `cpu`; return which implementation ran.

    Raises a MeasurementError like `compile_kernels`, or if torch cannot use the device.
    """
    function = "quasar_kernels.diagnosis:find_paths"
    return PathsTaken.model_validate(call(function, device, options=Options(device)))


def examine(
    device: str,
    *,
    find: Callable[[str], PathsTaken] = find_paths,
    build: Callable[[tuple[int, int]], Builds] = compile_kernels,
) -> Iterator[Finding]:
    """Yield each finding as soon as it is made; a separate process compiles for each capability.

    A fault is a failure if it affects this machine's GPUs, or if a compilation fails on a machine
    without a GPU. Other faults are warnings.
    """
    yield gpu(device)
    try:
        report = find(device)
    except MeasurementError as error:
        yield failure(device, *describe_failure(_with_log(error)))
        return
    here = {path.capability for path in report.paths if path.capability}
    if report.nvrtc_error:
        level = failure if any(one >= OLDEST for one in here) else warning
        yield level("nvrtc", *describe_failure(report.nvrtc_error, report.nvrtc_remedy))
    else:
        yield ok("nvrtc", report.nvrtc)
    for path in report.paths:
        yield serves(path)
    if report.nvrtc_error:
        names = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        yield warning("sm", f"nothing was compiled for {names}", "See the line of nvrtc.")
        return
    wanted = sorted({*CAPABILITIES, *(one for one in here if one >= OLDEST)})
    with ThreadPoolExecutor(MAX_PROCESSES) as pool:
        yield from pool.map(
            lambda one: compiles(one, build, needed=not here or one in here), wanted
        )


def serves(path: PathTaken) -> Finding:
    """Check that a device runs the best implementation, with correct results."""
    call = "" if path.call == "operator" else f" {path.call.removeprefix('operator ')}"
    name = f"{path.device} {path.dtype}{call}"
    if path.error:
        return failure(name, *describe_failure(f"{path.name}: {path.error}", path.remedy))
    result = f"{path.name}: {path.backend} serves"
    if path.rms is None or not path.rms <= TOLERANCE:  # NaN too
        return failure(name, f"{result} with wrong results: relative error {path.rms}", _UNKNOWN)
    if path.capability and path.capability >= OLDEST and path.backend != "cuda":
        detail, remedy = describe_failure(path.reason, path.remedy)
        return failure(name, f"{result}, not cuda: {detail}", remedy)
    return ok(name, f"{result}: {path.reason} (relative error {path.rms:.1e})")


def compiles(
    capability: tuple[int, int], build: Callable[[tuple[int, int]], Builds], *, needed: bool
) -> Finding:
    """Check that the kernels of operator and layer compile for a capability, in both dtypes."""
    name = "sm_{}{}".format(*capability)
    level = failure if needed else warning
    try:
        builds = build(capability).builds
    except MeasurementError as error:
        return level(name, *describe_failure(_with_log(error)))
    broken = [one for one in builds if one.error]
    if broken:
        which = " and ".join(f"{one.program} {one.dtype}" for one in broken)
        detail, remedy = describe_failure(broken[0].error, broken[0].remedy)
        return level(name, f"{which}: {detail}", remedy)
    return ok(name, ", ".join(map(_built, builds)))


def _built(one: Build) -> str:
    kind = "machine code" if one.machine_code else "PTX, for a GPU that this NVRTC does not know"
    return f"{one.program} {one.dtype}: {kind} in {one.seconds:.1f} s"


def describe_failure(text: str, remedy: str = "") -> tuple[str, str]:
    """Return a failure's first line with its cause, and the known remedy or `remedy`."""
    line = next((x.strip() for x in text.splitlines() if x.strip()), "no reason given")
    known = explain(text)
    if known is not None:
        return f"{line.rstrip('.')}: {known.cause}", known.remedy
    return line, remedy[:1].upper() + remedy[1:] or _UNKNOWN


def _with_log(error: MeasurementError) -> str:
    # describe_failure shows the first line, and searches all lines for known messages
    return f"{error.reason}\n{error.log_tail}"
