"""Measure the delta rule, with a decay and without, beside other libraries' functions.

    python -m benchmarks.delta_rule.speed --out benchmarks/h200/delta-rule.json [--without NAME]

Forward, forward and backward, decoding; outputs and gradients against float64. --without leaves an
implementation out. It takes five minutes; `--part PLACE OF` measures a part of the calls, for as
many GPUs of one machine as there are parts, and `--join FILE FILE ...` puts their files together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import autotuning, compiling
from benchmarks.delta_rule.calls import (
    NAMES,
    TENSORS,
    Inputs,
    draw,
    exact,
    forward,
    gradients,
    selected,
    step,
)
from benchmarks.delta_rule.libraries import LIBRARIES, takes, versions
from benchmarks.delta_rule.results import (
    LONG,
    ROWS,
    RULES,
    Decoding,
    DeltaRuleResults,
    Row,
    Rule,
    Way,
    delta_rule_criteria,
    joined,
)
from benchmarks.engine import clocks, commands
from benchmarks.engine.clocks import eager_ms, free, graph_ms
from benchmarks.engine.commands import say
from benchmarks.engine.limits import missed
from benchmarks.operator.implementations import timing
from benchmarks.operator.results import Timing
from benchmarks.operator.training_results import Shape
from benchmarks.results import load, origin, write
from quasar_kernels.mount import mount
from quasar_kernels.reference import relative_rms

MODULE = "benchmarks.delta_rule.speed"
CHECKED_TOKENS = 4096
"""Gradients, whose oracle keeps all of autograd's float64 tensors, are compared over so many."""
BATCHES, WIDTHS, HEADS = (1, 64), (64, 128), 8
DECODING = ("triton", "host")
"""Of ours Triton serves a token."""

PROTOCOL = """\
bf16, q and k of unit length, decays as a Gated DeltaNet layer with default weights makes them. \
Triton and CUDA: quasar_kernels.delta_rule with QUASAR_BACKEND of that name; host: the function of \
the same name and arguments in flash-linear-attention, its own even where FlashQLA is installed, \
whose variants are timed for 10 ms each to choose the fastest; FlashQLA, FlashInfer: their gated \
delta rule for heads of 128, FlashInfer's forward alone, the decays' exponentials that it takes \
computed in the call. Outputs are compared with the float64 chunk form (the first sequence of a \
batch), gradients over the first 4,096 tokens of a sequence with float64 autograd. The GPU is \
warmed with matrix products first, and each call runs for 0.2 s before it is timed. Graph: median \
of 11 runs of CUDA-graph replays without a gap; from rest: 0.3 s without work, three replays, then \
ten that are timed, as validators time a layer, median of 5; eager: the host's clock between \
synchronizes around calls in a row. Decoding: one token, eight heads, many states taken in turn so \
that the L2 cache does not serve them, ours in place; the copy is of such states, also in turn."""


def first_part(x: Inputs, tokens: int) -> Inputs:
    """Return the first tokens of the first sequence."""
    return Inputs(*(None if t is None else t[:1, :tokens] for t in x))  # type: ignore[arg-type]


def compared(way: Way, x: Inputs, do: Tensor) -> tuple[Inputs, Callable[..., dict[str, Tensor]]]:
    """Return what is compared with float64: the inputs, and what gives a function's results."""
    if way == "forward":
        part = first_part(x, x.q.shape[1])
        return part, lambda function, given: {"o": forward(function, given)}
    part = first_part(x, CHECKED_TOKENS)

    def results(function: object, given: Inputs) -> dict[str, Tensor]:
        found = gradients(function, given, do[:1, :CHECKED_TOKENS])
        return dict(zip(TENSORS, found, strict=False))

    return part, results


def wide(x: Inputs) -> Inputs:
    """Return the inputs in float64."""
    return Inputs(*(None if t is None else t.double() for t in x))  # type: ignore[arg-type]


def measure_row(rule: Rule, way: Way, shape: Shape, names: Sequence[str]) -> Row:
    """Compare one call with float64, see that it repeats, and time it by implementation."""
    names = [name for name in names if name not in LIBRARIES or takes(name, rule, way, shape)]
    x = draw(rule, shape)
    do = torch.randn_like(x.q)
    part, results = compared(way, x, do)
    expected = results(exact, wide(part))
    times, errors, repeats, failures = {}, {}, {}, {}
    for name in names:
        try:
            with selected(name, "chunk", rule) as function:
                clocks.poison()
                found, again = (results(function, part) for _ in range(2))
                wrong = {t: relative_rms(y, expected[t]) for t, y in found.items()}
                same = all(torch.equal(y, again[t]) for t, y in found.items())
                del found, again
                if way == "forward":
                    call: Callable[[], object] = partial(forward, function, x)
                else:
                    call = partial(gradients, function, x, do)
                # a row of three names takes eight seconds, two of them for each rest
                rested = name == "cuda" or (name == "host" and shape == LONG)
                times[name] = timing(call, rested=rested and way == "forward")
                errors[name], repeats[name] = wrong, same
                del call
        except Exception as error:  # a library refuses calls that its compiler gets wrong
            failures[name] = f"{type(error).__name__}: {error}"
        free()
    free()
    say(
        f"{rule}, {way}, {shape}: "
        + ", ".join(f"{n} {t.graph_ms:.3f} ms" for n, t in times.items())
        + "".join(f"; {name}: {why}" for name, why in failures.items())
    )
    return Row(
        rule=rule, way=way, shape=shape, times=times, errors=errors, repeats=repeats,
        failures=failures,
    )  # fmt: skip


def compile_share(share: compiling.Share) -> None:
    """Call everything that is measured once: the host's functions on a few tokens."""
    mount()
    for number, (rule, way, shape) in enumerate(ROWS):
        # all processes hold such inputs at once, and no variant depends on how many there are
        few = shape._replace(tokens=min(shape.tokens, compiling.TOKENS // min(shape.batch, 8)))
        for name in NAMES:
            if name in LIBRARIES and not takes(name, rule, way, shape):
                continue
            if name == "host":
                compiling.attempt(name, partial(call_once, name, rule, way, few))
            elif share.has(number):
                compiling.attempt(name, partial(call_once, name, rule, way, shape))
            free()
    torch.cuda.synchronize()


def call_once(name: str, rule: Rule, way: Way, shape: Shape) -> None:
    """Call one implementation."""
    x = draw(rule, shape)
    with selected(name, "chunk", rule) as function, torch.no_grad():
        if way == "forward":
            forward(function, x)
        else:
            gradients(function, x, torch.randn_like(x.q))


def measure_decoding(names: Sequence[str]) -> Iterator[Decoding]:
    """Time one token, and copies of the states beside it."""
    for rule in RULES:
        for width in WIDTHS:
            for batch in BATCHES:
                x = draw(rule, Shape(batch, 1, HEADS, width))
                state = torch.randn(batch, HEADS, width, width, device="cuda")
                sets = clocks.states_in_turn(state.nbytes)
                states = [state.clone() for _ in range(sets)]
                targets = [torch.empty_like(state) for _ in range(sets)]
                times = {}
                for name in names:
                    if name not in DECODING:
                        continue
                    with selected(name, "fused_recurrent", rule) as function:
                        turns = [partial(step, name, function, x, s) for s in states]
                        times[name] = Timing(graph_ms=graph_ms(turns), eager_ms=eager_ms(turns))
                yield Decoding(
                    rule=rule, batch=batch, width=width, state_bytes=4 * state.numel(),
                    times=times, copy_ms=clocks.copy_ms(states, targets),
                )  # fmt: skip
    say("decoding")


def measure(
    names: Sequence[str], commit: str | None, place: int = 0, of: int = 1
) -> Iterator[DeltaRuleResults]:
    """Run everything, or one of several parts; yield what there is after each row."""
    compiling.side_by_side(MODULE)
    mount()
    torch.manual_seed(0)
    found, missing = versions(names)
    names = [name for name in names if name not in missing]
    with torch.no_grad(), autotuning.brief():
        clocks.soak(2)
        results = DeltaRuleResults(
            **origin(commit),
            protocol=PROTOCOL,
            host=f"fla-core {metadata.version('fla-core')}",
            libraries=found,
            missing=missing,
            rows=(),
            decoding=tuple(measure_decoding(names)) if place == 0 else (),
        )
        for row in ROWS[place::of]:
            rows = *results.rows, measure_row(*row, names)
            results = results.model_copy(update={"rows": rows})
            yield results


def main() -> None:
    """Measure, write the file as it grows, and say which figures miss their limits."""
    if sys.argv[1:2] == [compiling.FLAG]:
        share = compiling.Share.parse(sys.argv)
        with share.of_variants():
            compile_share(share)
        return
    parser = commands.options(__doc__)
    parser.add_argument("--without", choices=NAMES, action="append", default=[])
    parser.add_argument("--part", type=int, nargs=2, metavar=("PLACE", "OF"), default=(0, 1))
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="measure nothing")
    args = parser.parse_args()
    if args.join:
        results = joined([load(DeltaRuleResults, path) for path in args.join])
        write(args.out, results)
    else:
        names = [name for name in NAMES if name not in args.without]
        for results in measure(names, args.commit, *args.part):
            write(args.out, results)
    for miss in missed(delta_rule_criteria(results)):
        print(f"misses its limit: {miss}")


if __name__ == "__main__":
    main()
