"""The parts of docs/benchmarks.md that profile.py and accuracy.py make, and the bound's."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.layer.results import LayerAccuracy, LayerProfile
from benchmarks.layer.steps import STEPS, find_steps
from benchmarks.markdown import records, table
from harness.hardware.gpus import ceiling as card_ceiling
from harness.hardware.gpus import known
from harness.hardware.machine import Environment
from harness.hardware.roofline import ceiling, speed_of_light

WAYS = {
    "training": "the validator's loop",
    "no_grad": "`no_grad`, one call",
    "slices": "`no_grad`, slices of a million",
}
TREES = {"overlay": "layer", "overlay-ops": "ops"}


def profile_table(profile: LayerProfile) -> str:
    """Return where a call's time goes, step by step, beside the least that each step must do."""

    def line(
        what: str, kernels: str, launches: int, ms: float, moved: int, flops: int, floor: float
    ) -> dict[str, str]:
        return {
            "step": what,
            "kernels": kernels,
            "launches": str(launches),
            "ms": f"{ms:.3f}",
            "share": f"{ms / profile.call_ms:.1%}",
            "GB": f"{moved / 1e9:.2f}" if moved else "",
            "TFLOP": f"{flops / 1e12:.2f}" if flops else "",
            "floor, ms": f"{floor:.2f}" if floor else "",
            "of floor": f"{floor / ms:.0%}" if floor else "",
        }

    rows, least = [], 0.0
    for step, names, launches, ms in find_steps(profile.launches, STEPS[profile.tree]):
        floor = step.floor_ms(profile)
        least += floor
        kernels = ", ".join(f"`{name}`" for name in names)
        moved, flops = step.bytes * profile.tokens, step.flops * profile.tokens
        rows.append(line(step.what, kernels, launches, ms, moved, flops, floor))
    busy = sum(launch.ms for launch in profile.launches)
    idle = profile.call_ms - busy
    rows.append(line("all kernels", "", len(profile.launches), busy, 0, 0, least))
    return (
        f"`FORK_SCOPE={TREES[profile.tree]}`: a call of {profile.tokens:,} tokens takes "
        f"{profile.call_ms:.3f} ms in the validator's loop. By kernel, medians of {profile.calls} "
        f"profiled calls; what they sum to differs from that by {idle:+.3f} ms. The floor is the "
        "longer of moving a step's tensors once at the bandwidth of a copy "
        f"({profile.copy_gb_per_s / 1e3:.2f} TB/s) and its operations at the rate of a large bf16 "
        f"product ({profile.product_tflops:.0f} TFLOP/s), both measured in the same run.\n\n"
        + records(rows)
    )


def accuracy_tables(accuracy: LayerAccuracy) -> str:
    """Return the tables of errors, of decoding and exchange, and of long sequences."""
    machine = accuracy.environment
    parts = [
        "The layer under bf16 autocast against the layer in float64 "
        f"(`benchmarks.layer.accuracy`, commit {accuracy.commit}, {machine.gpu}):",
        _outputs(accuracy),
        "Relative RMS errors of gradients against float64 autograd, for a random gradient of the "
        "output:",
        _gradients(accuracy),
        _decoding(accuracy),
        "Long sequences. Memory includes input and output; the speeds are lower bounds, as the GPU "
        "may have run the gates meanwhile:",
        _long_runs(accuracy),
    ]
    return "\n\n".join(parts)


def _outputs(accuracy: LayerAccuracy) -> str:
    return records(
        {
            "tokens": f"{found.tokens:,}",
            "relative RMS": f"{found.relative_rms:.1e}",
            "worst eighth": f"{found.worst_eighth:.1e}",
            "cosine": f"{found.cosine:.6f}",
            "largest difference": f"{found.max_difference:.3g}",
            "reruns": "bitwise equal" if found.reruns_equal else "differ",
        }
        for found in accuracy.outputs
    )


def _gradients(accuracy: LayerAccuracy) -> str:
    names = list(accuracy.gradients[0].errors)
    header = ("gradient of", *(f"{found.tokens:,} tokens" for found in accuracy.gradients))
    rows = [
        (f"`{name}`", *(f"{found.errors[name]:.1e}" for found in accuracy.gradients))
        for name in names
    ]
    return table(header, rows)


def _decoding(accuracy: LayerAccuracy) -> str:
    decoding, exchange = accuracy.decoding, accuracy.exchange
    return (
        f"Decoding {decoding.decoded} tokens one by one after a prefill of {decoding.prefill:,}: "
        f"error {decoding.error:.1e} against float64, {decoding.error_of_one_call:.1e} for the "
        f"same tokens within one call; the two are {decoding.apart:.1e} apart. Weights load "
        f"strictly both ways: the public layer with ours has error {exchange.ours_in_public:.1e} "
        f"over {exchange.tokens:,} tokens, our layer with the public one's "
        f"{exchange.public_in_ours:.1e}."
    )


def _long_runs(accuracy: LayerAccuracy) -> str:
    return records(
        {
            "tokens": f"{run.tokens:,}",
            "how": WAYS[run.how],
            "M tokens/s": f"{run.tokens_per_sec / 1e6:.1f}",
            "peak memory, GB": f"{run.peak_bytes / 1e9:.1f}",
            "slices against one call": ""
            if run.slices_apart is None
            else f"{run.slices_apart:.1e}",
        }
        for run in accuracy.long_runs
    )


def bound_of(machine: Environment) -> float | None:
    """Return the tokens/s that nothing exceeds on a GPU; None where nobody knows it."""
    card = known(machine.gpu or "")
    return ceiling(machine) or (card_ceiling(card) if card else None)


def shares_of_bound(machine: Environment, speeds: Mapping[str, Mapping[int, float]]) -> str:
    """Return how near the layer comes to the hardware's bound, and how much of the gap it closes.

    Args:
        speeds: M tokens/s by tree and length; where another tree has none stands a dash.
    """
    exact = bound_of(machine)
    if exact is None:
        return "The bound of this GPU is not known."
    bound = exact / 1e6
    rows = []
    for n, ours in speeds["overlay"].items():
        closed = [
            f"{speed_of_light(ours, bound, speeds[other][n]):.1%}" if n in speeds[other] else "-"
            for other in ("public-fork", "peer")
        ]
        rows.append([f"{n:,}", f"{ours / bound:.1%}", *closed])
    names = ("tokens", "of bound", "gap closed, from public fork", "gap closed, from peer")
    return f"{table(names, rows)}\n\nThe bound is {bound:.0f} M tokens/s."
