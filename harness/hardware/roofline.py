"""The hardware bound of a GPU's speed, from the least bytes and operations per token."""

from __future__ import annotations

from harness.hardware.machine import Environment
from harness.workload import WORKLOAD

TENSOR_OPERATIONS = {
    "8.0": 2048,
    "8.6": 1024,
    "8.7": 2048,
    "8.9": 1024,
    "9.0": 4096,
    "10.0": 8192,
    "10.3": 8192,
    "12.0": 1024,
    "12.1": 1024,
}
"""Dense bf16 operations of one multiprocessor in one clock, by compute capability, from NVIDIA's
architecture papers. If cards of one capability differ, this is the fastest."""


def bytes_per_token() -> int:
    """Return the least bytes moved per token: reading the fp32 input, writing the bf16 output."""
    return (4 + 2) * WORKLOAD.hidden_size


def operations_per_token() -> int:
    """Return the least operations per token: the layer's products and one step of its state.

    The products are those of q, k, v, the output projection and the output gate of rank
    `head_dim`. A step multiplies the state by k, updates it, and multiplies it by q.
    """
    hidden, size = WORKLOAD.hidden_size, WORKLOAD.head_dim
    width = WORKLOAD.num_heads * size
    products = 4 * hidden * width + hidden * size + size * width
    return 2 * (products + 3 * WORKLOAD.num_heads * size * size)


def hardware_bound(machine: Environment | None) -> float | None:
    """Return the bound of this GPU at its highest clocks, in tokens/s; None if unknown."""
    if machine is None or machine.device == "cpu":
        return None
    rates = []
    if machine.memory_bus_bits and machine.memory_clock_max_mhz:
        # two transfers in each clock that NVML reports
        moved = machine.memory_bus_bits / 8 * 2 * machine.memory_clock_max_mhz * 1e6
        rates.append(moved / bytes_per_token())
    per_clock = TENSOR_OPERATIONS.get(machine.compute_capability or "")
    if per_clock and machine.multiprocessors and machine.sm_clock_max_mhz:
        done = per_clock * machine.multiprocessors * machine.sm_clock_max_mhz * 1e6
        rates.append(done / operations_per_token())
    return min(rates, default=None)


def speed_of_light(speed: float, bound: float, baseline: float) -> float:
    """Return the share of the baseline's time above the bound that `speed` saves.

    0 at the baseline, 1 at the bound, negative below the baseline; all three are tokens/s.
    """
    return (1 / baseline - 1 / speed) / (1 / baseline - 1 / bound)
