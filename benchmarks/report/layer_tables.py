"""The tables of the layer's training steps and of its errors."""

from __future__ import annotations

from benchmarks.cases.layer_training import Shape, memory
from benchmarks.engine.results import Row, Run, versions
from benchmarks.report.markdown import gib, records, table, times

WAYS = {
    "training": "the validator's loop",
    "no_grad": "`no_grad`, one call",
    "slices": "`no_grad`, slices of a million",
}


def _measured_by(run: Run, case: str) -> str:
    machine = run.environment
    where = f"{machine.gpu}, driver {machine.driver}, {versions(machine)}" if machine else "unknown"
    return f"`python -m benchmarks {case}`, {run.created}, commit {run.commit}, {where}"


def training(run: Run) -> str:
    """Return the tables of training steps' costs and errors, with how they were measured."""

    def row_cells(row: Row) -> dict[str, str]:
        ours, theirs = (gib(memory(row, name)) for name in ("ours", "baseline"))
        equal = row.figure("ours", "reruns_equal")
        return {
            "layer, input": Shape(**row.of).label(),
            **{
                f"{name}: {what}, ms": times(row.figure(name, f"{what}_ms"), 2)
                for name in ("ours", "baseline")
                for what in ("forward", "step")
            },
            "baseline / ours": times(row.ratio("step_ms", "baseline", "ours"), 2),
            "memory, ours / baseline, GiB": f"{ours} / {theirs}",
            "graphs' part, GiB": gib(row.figure("ours", "graph_bytes")),
            "reruns": "bitwise equal" if equal else "differ",
        }

    errors = []
    for entry in run.table("gradients"):
        tensor, error = entry.worst()
        label = Shape(**entry.of).label()  # type: ignore[arg-type]
        errors.append((label, f"`{tensor}`", f"{error:.1e}"))
    parts = [
        f"{run.protocol} ({_measured_by(run, 'layer_training')}.)",
        records(map(row_cells, run.rows("steps"))),
        "The gradient of ours that is farthest from float64 autograd, relative RMS:",
        table(("layer, input", "gradient of", "error"), errors),
    ]
    return "\n\n".join(parts)


def accuracy(run: Run) -> str:
    """Return the tables of errors, of decoding and exchange, and of long sequences."""
    gradients = run.table("gradients")
    header = ("gradient of", *(f"{e.of['tokens']:,} tokens" for e in gradients))
    rows = [(f"`{n}`", *(f"{e.errors[n]:.1e}" for e in gradients)) for n in gradients[0].errors]
    parts = [
        "The layer under bf16 autocast against the layer in float64 "
        f"({_measured_by(run, 'layer_accuracy')}):",
        _outputs(run),
        "Relative RMS errors of gradients against float64 autograd, for a random gradient of the "
        "output:",
        table(header, rows),
        _decoding(run),
        "Long sequences. Memory includes input and output; the speeds are lower bounds, as the GPU "
        "may have run other checks meanwhile:",
        _long_runs(run),
    ]
    return "\n\n".join(parts)


def _outputs(run: Run) -> str:
    return records(
        {
            "tokens": f"{entry.of['tokens']:,}",
            "relative RMS": f"{entry.errors['y']:.1e}",
            "worst eighth": f"{entry.errors['worst eighth']:.1e}",
            "cosine": f"{entry.figures['cosine']:.6f}",
            "largest difference": f"{entry.figures['max_difference']:.3g}",
            "reruns": "bitwise equal" if entry.figures["reruns_equal"] else "differ",
        }
        for entry in run.table("outputs")
    )


def _decoding(run: Run) -> str:
    (decoding,), (exchange,) = run.table("decoding"), run.table("exchange")
    errors, swapped = decoding.errors, exchange.errors
    return (
        f"Decoding {decoding.of['decoded']} tokens one by one after a prefill of "
        f"{decoding.of['prefill']:,}: error {errors['decoded']:.1e} against float64, "
        f"{errors['one call']:.1e} for the same tokens within one call; the two are "
        f"{errors['apart']:.1e} apart. Weights load strictly both ways: the public layer with ours "
        f"has error {swapped['ours in public']:.1e} over {exchange.of['tokens']:,} tokens, our "
        f"layer with the public one's {swapped['public in ours']:.1e}."
    )


def _long_runs(run: Run) -> str:
    return records(
        {
            "tokens": f"{entry.of['tokens']:,}",
            "how": WAYS[str(entry.of["how"])],
            "M tokens/s": f"{entry.figures['tokens_per_sec'] / 1e6:.1f}",
            "peak memory, GB": f"{entry.figures['peak_bytes'] / 1e9:.1f}",
            "slices against one call": f"{e:.1e}" if (e := entry.errors.get("slices")) else "",
        }
        for entry in run.table("long runs")
    )
