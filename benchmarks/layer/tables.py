"""The parts of docs/benchmarks.md that profile.py's and accuracy.py's figures make."""

from __future__ import annotations

from benchmarks.layer.results import LayerAccuracy, LayerProfile
from benchmarks.layer.steps import STEPS, find_steps
from benchmarks.markdown import table

WAYS = {
    "training": "the validator's loop",
    "no_grad": "`no_grad`, one call",
    "slices": "`no_grad`, slices of a million",
}
TREES = {"overlay": "layer", "overlay-ops": "ops"}


def profile_table(profile: LayerProfile) -> str:
    """Return where a call's time goes, step by step, beside the least that each step must do."""
    header = ("step", "kernels", "launches", "ms", "share", "GB", "TFLOP", "floor, ms", "of floor")
    rows, least = [], 0.0
    for found in find_steps(profile.launches, STEPS[profile.tree]):
        floor = found.step.floor_ms(profile)
        least += floor
        moved, flops = found.step.bytes * profile.tokens, found.step.flops * profile.tokens
        row = (
            found.step.what,
            ", ".join(f"`{name}`" for name in found.kernels),
            str(found.launches),
            f"{found.ms:.3f}",
            f"{found.ms / profile.call_ms:.1%}",
            f"{moved / 1e9:.2f}" if moved else "",
            f"{flops / 1e12:.2f}" if flops else "",
            f"{floor:.2f}" if floor else "",
            f"{floor / found.ms:.0%}" if floor else "",
        )
        rows.append(row)
    busy = sum(launch.ms for launch in profile.launches)
    idle = profile.call_ms - busy
    launches = str(len(profile.launches))
    rows.append(("all kernels", "", launches, f"{busy:.3f}", f"{busy / profile.call_ms:.1%}",
                 "", "", f"{least:.2f}", f"{least / busy:.0%}"))  # fmt: skip
    return (
        f"`FORK_SCOPE={TREES[profile.tree]}`: a call of {profile.tokens:,} tokens takes "
        f"{profile.call_ms:.3f} ms in the validator's loop. By kernel, medians of {profile.calls} "
        f"profiled calls; what they sum to differs from that by {idle:+.3f} ms. The floor is the "
        "longer of moving a step's tensors once at the bandwidth of a copy "
        f"({profile.copy_gb_per_s / 1e3:.2f} TB/s) and its operations at the rate of a large bf16 "
        f"product ({profile.product_tflops:.0f} TFLOP/s), both measured in the same run.\n\n"
        + table(header, rows)
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
    header = ("tokens", "relative RMS", "worst eighth", "cosine", "largest difference", "reruns")
    rows = [
        (
            f"{found.tokens:,}",
            f"{found.relative_rms:.1e}",
            f"{found.worst_eighth:.1e}",
            f"{found.cosine:.6f}",
            f"{found.max_difference:.3g}",
            "bitwise equal" if found.reruns_equal else "differ",
        )
        for found in accuracy.outputs
    ]
    return table(header, rows)


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
    header = ("tokens", "how", "M tokens/s", "peak memory, GB", "slices against one call")
    rows = [
        (
            f"{run.tokens:,}",
            WAYS[run.how],
            f"{run.tokens_per_sec / 1e6:.1f}",
            f"{run.peak_bytes / 1e9:.1f}",
            "" if run.slices_apart is None else f"{run.slices_apart:.1e}",
        )
        for run in accuracy.long_runs
    ]
    return table(header, rows)
