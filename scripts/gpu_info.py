"""Print the hardware bounds of this machine's GPU and other cards, and suitable targets.

    python scripts/gpu_info.py

No kernel can exceed the bound: it counts one read of the input, one write of the output and the
layer's matrix products, at the card's rates.
"""

from __future__ import annotations

import argparse
import sys

from harness.hardware.gpus import GPUS, Gpu, best_target, ceiling, known, settings
from harness.measuring.runner import MeasurementError, probe
from neurons.wire.rules import weighted_score

HEADER = (
    f"{'GPU':<26} {'GiB':>5} {'TB/s':>6} {'TFLOP/s':>8} {'bound, M tokens/s':>18} {'target':>10}"
)


def line(gpu: Gpu) -> str:
    """Return a line of the table."""
    target = best_target(gpu.memory_gib, gpu.capability)
    text = f"{target:,}" if target else "none"
    return (
        f"{gpu.name.removeprefix('NVIDIA '):<26} {gpu.memory_gib:>5g} {gpu.bandwidth / 1e12:>6.2f} "
        f"{gpu.operations / 1e12:>8g} {ceiling(gpu) / 1e6:>18.0f} {text:>10}"
    )


def main() -> int:
    """Print this machine's GPU and the table of known ones."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    try:
        machine = probe()
    except MeasurementError as error:
        print(f"This machine cannot be asked: {error.reason}")
        return 1
    if machine.gpu is None or machine.gpu_memory_mb is None:
        print("No NVIDIA GPU here: lengths up to 2,048 tokens are measured on the CPU.")
    else:
        memory = machine.gpu_memory_mb / 1024
        gpu = known(machine.gpu)
        print(f"{machine.gpu}, {memory:.1f} GiB, capability {machine.compute_capability}")
        if gpu is None:
            print("It is not in the table: its bound is not known; it is tuned at its first call.")
        else:
            best = weighted_score(ceiling(gpu), best_target(memory, gpu.capability) or 1)
            print(f"No kernel exceeds {ceiling(gpu):,.0f} tokens/s here, a score of {best:,.0f}.")
        print(
            "For .env:",
            *(
                f"{name}={value}"
                for name, value in settings(memory, machine.compute_capability).items()
            ),
        )
    print("", HEADER, *(line(gpu) for gpu in GPUS), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
