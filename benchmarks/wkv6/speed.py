"""Measure WKV6 beside the host library's functions.

    python -m benchmarks.wkv6.speed --out benchmarks/h200/wkv6.json [--tokens N ...]

Forward, forward and backward; outputs and gradients against float64. --without leaves an
implementation out; those that take one token after the other stop at 16,384 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from typing import get_args

import torch
from torch import Tensor

from benchmarks import autotuning, compiling
from benchmarks.engine import clocks, commands
from benchmarks.engine.clocks import free
from benchmarks.engine.commands import say
from benchmarks.engine.limits import missed
from benchmarks.operator.implementations import timing
from benchmarks.operator.results import Timing
from benchmarks.operator.training_results import Shape
from benchmarks.results import origin, write
from benchmarks.wkv6.calls import HOST, NAMES, TENSORS, Function, Inputs, draw, exact, gradients
from benchmarks.wkv6.calls import implementation as implementation_of
from benchmarks.wkv6.page import speeds
from benchmarks.wkv6.results import Row, Way, WKV6Results, wkv6_criteria
from quasar_kernels.mount import mount
from quasar_kernels.reference import relative_rms

MODULE = "benchmarks.wkv6.speed"
TOKENS = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
HEADS, WIDTH = 8, 64
CHECKED_TOKENS = 4096
"""Results are compared over so many first tokens: the oracle keeps autograd's float64 tensors."""
RECURRENT_TOKENS = 16_384
"""Longest call of the kernels that take one token after the other."""

PROTOCOL = """\
One sequence, 8 heads of 64, r, k and v in bf16, log decays in fp32 as a fresh RWKV-6 layer has \
them with noise of half a unit. Triton and CUDA C++: quasar_kernels.blocks; chunk and \
recurrent: flash-linear-attention's chunk_rwkv6 and fused_recurrent_rwkv6, whose variants are \
timed for 10 ms each to choose the fastest. Outputs, and gradients of all five inputs, are \
compared with float64 over the first 4,096 tokens. The GPU is warmed with matrix products first, \
and each call runs for 0.2 s before it is timed. Graph: median of 11 runs of CUDA-graph replays \
without a gap; eager: the host's clock between synchronizes around calls in a row. Memory: the \
most that was allocated during a call, inputs included."""


def compared(
    way: Way, x: Inputs, do: Tensor
) -> Callable[[Function, torch.dtype], dict[str, Tensor]]:
    """Return what gives a function's results over the first tokens, from inputs of a dtype."""
    r, k, v, w = (t[:, :CHECKED_TOKENS] for t in x[:4])
    first = Inputs(r, k, v, w, x.u)

    def results(function: Function, dtype: torch.dtype) -> dict[str, Tensor]:
        given = Inputs(*(t.double() for t in first)) if dtype == torch.float64 else first
        if way == "forward":
            return {"o": function(*given)[0]}
        found = gradients(function, given, do[:, :CHECKED_TOKENS])
        return dict(zip(TENSORS, found, strict=True))

    return results


def compile_share(share: compiling.Share, lengths: Sequence[int]) -> None:
    """Call everything that is measured once: the host's functions on a few tokens."""
    mount()
    calls = [(way, tokens) for way in get_args(Way) for tokens in lengths]
    for number, (way, tokens) in enumerate(calls):
        for name in names_at(tokens, NAMES):
            if name in HOST:
                few = min(tokens, compiling.TOKENS)
                compiling.attempt(name, partial(call_once, name, way, few))
            elif share.has(number):
                compiling.attempt(name, partial(call_once, name, way, tokens))
            free()
    torch.cuda.synchronize()


def call_once(name: str, way: Way, tokens: int) -> None:
    """Call one implementation."""
    x, function = draw(Shape(1, tokens, HEADS, WIDTH)), implementation_of(name)
    with torch.no_grad():
        if way == "forward":
            function(*x)
        else:
            gradients(function, x, torch.randn_like(x.v))


def names_at(tokens: int, names: Sequence[str]) -> list[str]:
    """Return the implementations that are measured over so many tokens."""
    return [n for n in names if n not in ("cuda", "recurrent") or tokens <= RECURRENT_TOKENS]


def peak_of(call: Callable[[], object]) -> int:
    """Return the most bytes that are allocated during a call, which ran once before."""
    call()
    free()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def measure_row(way: Way, tokens: int, names: Sequence[str]) -> Row:
    """Compare one call with float64 and time it, by implementation."""
    shape = Shape(1, tokens, HEADS, WIDTH)
    x = draw(shape)
    do = torch.randn_like(x.v)
    results = compared(way, x, do)
    expected = results(exact, torch.float64)
    times: dict[str, Timing] = {}
    peaks: dict[str, int] = {}
    errors, failures = {}, {}
    for name in names_at(tokens, names):
        function = implementation_of(name)
        try:
            clocks.poison()
            found = results(function, torch.bfloat16)
            errors[name] = {t: relative_rms(y, expected[t]) for t, y in found.items()}
            del found
            backward = partial(gradients, function, x, do)
            call = partial(function, *x) if way == "forward" else backward
            peaks[name], times[name] = peak_of(call), timing(call)
            del call, backward
        except Exception as error:  # no memory, most often
            failures[name] = f"{type(error).__name__}: {error}"
        free()
    say(
        f"{way}, {shape}: "
        + ", ".join(f"{n} {t.graph_ms:.3f} ms" for n, t in times.items())
        + "".join(f"; {name}: {why}" for name, why in failures.items())
    )
    return Row(
        way=way, shape=shape, times=times, peak_bytes=peaks, errors=errors, failures=failures
    )


def measure(
    names: Sequence[str], tokens: Sequence[int], commit: str | None
) -> Iterator[WKV6Results]:
    """Run everything; yield what there is after each row."""
    compiling.side_by_side(MODULE, *tokens)
    mount()
    torch.manual_seed(0)
    with torch.no_grad(), autotuning.brief():
        clocks.soak(2)
        results = WKV6Results(
            **origin(commit),
            protocol=PROTOCOL,
            host=f"fla-core {metadata.version('fla-core')}",
            rows=(),
        )
        for way in get_args(Way):
            for count in tokens:
                rows = *results.rows, measure_row(way, count, names)
                free()
                results = results.model_copy(update={"rows": rows})
                yield results


def main() -> None:
    """Measure, write the file as it grows, show the table, and say what misses its limit."""
    if sys.argv[1:2] == [compiling.FLAG]:
        share = compiling.Share.parse(sys.argv)
        with share.of_variants():
            compile_share(share, [int(tokens) for tokens in sys.argv[2:-2]])
        return
    parser = commands.options(__doc__)
    parser.add_argument("--without", choices=NAMES, action="append", default=[])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths to measure")
    args = parser.parse_args()
    names = [name for name in NAMES if name not in args.without]
    for results in measure(names, args.tokens, args.commit):
        write(args.out, results)
    print(speeds(results))
    for miss in missed(wkv6_criteria(results)):
        print(f"misses its limit: {miss}")


if __name__ == "__main__":
    main()
