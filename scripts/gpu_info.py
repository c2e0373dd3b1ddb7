"""Print hardware bounds, estimated speeds and longest lengths of this machine's GPU and others.

    python scripts/gpu_info.py

No kernel can exceed the bound: it counts one read of the input, one write of the output, the
layer's matrix products and its state's updates, at the card's rates. Speeds are estimates from
kernels that were measured on an H200 and an H100; docs/results/cards.md explains them and lists
measured runs.
"""

from __future__ import annotations

import sys

from benchmarks.report.estimates import Estimates
from harness.hardware.gpus import GPUS, Gpu, best_target, known, longest, published_bound, settings
from harness.hardware.machine import Environment
from harness.measuring.runner import MeasurementError, probe
from neurons.wire.rules import weighted_score
from quasar_kernels.arguments import Parser

SHOWN = (2048, 100_000, 1_000_000)
"""Lengths in tokens for which the script prints the estimated speed."""
COLUMNS = "{:<22} {:>5} {:<8} {:>6} {:>7} {:>8} {:>10} {:>10} {:>13}"
HEADER = "\n".join(
    (
        COLUMNS.format("", "", "", *["M tok/s"] * 4, "largest", "largest call"),
        COLUMNS.format(
            "GPU", "GiB", "path", "bound", *(f"{n:,}" for n in SHOWN), "target", "trained"
        ),
    )
)


def line(gpu: Gpu, estimates: Estimates) -> str:
    """Return a card's line of the table."""
    target = best_target(gpu.memory_gib, gpu.capability)
    return COLUMNS.format(
        gpu.label,
        f"{gpu.memory_gib:g}",
        estimates.path(gpu).name,
        f"{published_bound(gpu) / 1e6:.0f}",
        *(f"{estimates.speed(n, gpu) / 1e6:.3g}" for n in SHOWN),
        f"{target:,}" if target else "none",
        f"{longest(gpu.memory_gib, gpu.capability, 'training'):,}",
    )


def describe(machine: Environment, estimates: Estimates) -> list[str]:
    """Return the lines about this machine's GPU, with suitable settings."""
    if machine.gpu is None or machine.gpu_memory_mb is None:
        return ["No NVIDIA GPU: lengths up to 2,048 tokens are measured on the CPU."]
    memory, capability = machine.gpu_memory_mb / 1024, machine.compute_capability
    lines = [f"{machine.gpu}, {memory:.1f} GiB, capability {capability}"]
    gpu, target = known(machine.gpu), best_target(memory, capability)
    if target is None:
        return [*lines, "Its memory is too small for every target; use a larger GPU or MIG slice."]
    if gpu is None:
        lines.append("It is not in the table: neither its speed nor its bound can be estimated.")
    else:
        speed = estimates.speed(target, gpu)
        lines.append(
            f"Estimate at {target:,} tokens: {speed / 1e6:.3g} M tokens/s, a score of "
            f"{weighted_score(speed, target):,.0f}. No kernel exceeds "
            f"{published_bound(gpu) / 1e6:.0f} M."
        )
    forward, training = (longest(memory, capability, way) for way in ("recorded", "training"))
    lines.append(f"Largest call: {forward:,} tokens in a validator's loop, {training:,} trained.")
    suitable = settings(memory, capability)
    return [*lines, "For .env:", *(f"{name}={value}" for name, value in suitable.items())]


def main() -> int:
    """Print this machine's GPU and the table of known ones."""
    Parser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    estimates = Estimates.load()
    try:
        machine = probe()
    except MeasurementError as error:
        print(f"This machine cannot be examined: {error.advice}")
        return 1
    print(*describe(machine, estimates), "", "Estimates, not measurements:", HEADER, sep="\n")
    print(*(line(gpu, estimates) for gpu in GPUS), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
