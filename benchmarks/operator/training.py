"""Measure forward and backward of the operator beside flash-linear-attention's delta rule.

    python -m benchmarks.operator.training --out benchmarks/h200/operator_training.json

Speed, and the gradients' accuracy against float64; about two minutes on an H200. --without leaves
an implementation out, --quick the peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.engine import clocks, commands
from benchmarks.engine.clocks import free
from benchmarks.engine.commands import say
from benchmarks.engine.limits import missed
from benchmarks.operator.implementations import (
    Operator,
    add_choice,
    chosen,
    peer_version,
    selected,
    timing,
)
from benchmarks.operator.training_results import (
    Gradients,
    Shape,
    Training,
    TrainingResults,
    training_criteria,
)
from benchmarks.results import origin, write
from harness.tuning.inputs import Inputs, layer_like
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, relative_rms

SHAPES = (
    Shape(1, 16_384, 8, 64),
    Shape(1, 262_144, 8, 64),
    Shape(1, 1_000_000, 8, 64),
    Shape(32, 2048, 8, 64),
    Shape(1, 65_536, 16, 128),
    Shape(4, 16_384, 16, 128),
)
TENSORS = ("q", "k", "v", "beta")
GRADIENT_TOKENS = 4096

PROTOCOL = """\
bf16, inputs as a layer with default weights makes them; the output's gradient is noise. Triton \
and CUDA: chunk_quasar and its backward pass with QUASAR_BACKEND of that name, step size included, \
gradients of q, k, v and beta. Peer: chunk_delta_rule with scale 1, the step size and its gradient \
by torch. The GPU is warmed with matrix products first, and each call runs for 0.2 s before it is \
timed. Graph: median of 11 runs of CUDA-graph replays without a gap; eager: the host's clock \
between synchronizes around calls in a row. Gradients are compared with float64 autograd."""


def gradients(
    run: Operator, inputs: Inputs, do: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Run forward and backward and return the gradients of q, k, v and beta."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    with torch.enable_grad():
        o = run(*leaves)
        return torch.autograd.grad(o, leaves, do.to(o.dtype))


def measure_training(names: Sequence[str]) -> list[Training]:
    """Time forward and backward."""
    rows = []
    for shape in SHAPES:
        inputs = layer_like(shape.tokens, shape.batch, shape.heads, shape.width)
        do, times = torch.randn_like(inputs[0]), {}
        for name in names:
            with selected(name) as run:
                times[name] = timing(partial(gradients, run, inputs, do))
        rows.append(Training(shape=shape, times=times))
        del inputs
        free()
        say(f"forward and backward of {shape}")
    return rows


def measure_gradients(names: Sequence[str]) -> Gradients:
    """Compare the gradients with float64 autograd through the chunk form."""
    inputs = layer_like(GRADIENT_TOKENS)
    do, errors = torch.randn_like(inputs[0]), {}
    expected = gradients(lambda *x: quasar_chunked(*x)[0], inputs, do, torch.float64)
    for name in names:
        with selected(name) as run:
            pairs = zip(TENSORS, gradients(run, inputs, do), expected, strict=True)
            errors[name] = {t: relative_rms(found, wanted) for t, found, wanted in pairs}
    say("gradients")
    return Gradients(tokens=GRADIENT_TOKENS, errors=errors)


def measure(names: Sequence[str], commit: str | None) -> TrainingResults:
    """Run forward and backward alone."""
    mount()
    torch.manual_seed(0)
    with torch.no_grad():
        clocks.soak(2)
        errors = measure_gradients(names)
        training = measure_training(names)
    return TrainingResults(
        **origin(commit),
        protocol=PROTOCOL,
        peer=peer_version(names),
        training=tuple(training),
        gradients=errors,
    )


def main() -> None:
    """Measure, write the file, and say which figures miss their limits."""
    args = add_choice(commands.options(__doc__)).parse_args()
    results = measure(chosen(args), args.commit)
    write(args.out, results)
    for miss in missed(training_criteria(results)):
        print(f"misses its limit: {miss}")


if __name__ == "__main__":
    main()
