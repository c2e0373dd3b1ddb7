"""The tables of what accuracy.py found: errors, gradients, decoding, long sequences."""

from __future__ import annotations

from benchmarks.layer.results import LayerAccuracy
from benchmarks.report.markdown import records, table
from benchmarks.results import versions

WAYS = {
    "training": "the validator's loop",
    "no_grad": "`no_grad`, one call",
    "slices": "`no_grad`, slices of a million",
}


def accuracy_tables(accuracy: LayerAccuracy) -> str:
    """Return the tables of errors, of decoding and exchange, and of long sequences."""
    machine = accuracy.environment
    parts = [
        "The layer under bf16 autocast against the layer in float64 "
        f"(`benchmarks.layer.accuracy`, {accuracy.created}, commit {accuracy.commit}, "
        f"{machine.gpu}, {versions(machine)}):",
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
