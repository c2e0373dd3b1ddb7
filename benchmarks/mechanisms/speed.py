"""Measure what each sequence mixer costs, one beside the other, in one table.

    python -m benchmarks.mechanisms.speed --out benchmarks/h200/mechanisms.json

--only NAME ... measures some, --tokens N ... other lengths, --limit SECONDS ends earlier or later:
what is not reached is named. `--device cpu --tokens 256 --only quasar softmax` is a trial without
a GPU. The file is written after every row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from benchmarks.engine import commands
from benchmarks.engine.commands import say
from benchmarks.mechanisms.names import ENTRIES, MACHINE
from benchmarks.mechanisms.page import tables
from benchmarks.mechanisms.results import MechanismsResults, Missing, Rates, Row, Trained
from benchmarks.mechanisms.turns import Lost, Wait, Work, in_turns
from benchmarks.results import write

TOKENS = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
LIMIT = 450.0
PACKAGES = ("fla-core", "mamba_ssm")

PROTOCOL = """\
bf16, one sequence, 8 heads of 64 channels (Mamba-2: values of 64 and a state of 64, B and C \
shared by the heads), log decays and step sizes in fp32, inputs as a fresh layer of each \
mechanism makes them. quasar_kernels: this project's; fla-core: flash-linear-attention's \
functions of these names, Mamba-2 by its simple GLA; token by token: the definition in fp32, \
up to 1,024 tokens; softmax: torch's \
scaled_dot_product_attention on the flash kernels, causal. Hybrid block: RWKV-6, Mamba-2 and \
Quasar side by side over 512 channels with norms, fusion and MLP, fp32 weights under bf16 \
autocast. Each call is first compared with float64 over its first 1,024 tokens, gradients of all \
inputs included, and with an error over 0.1 it is not timed. Graph: median of 5 runs of \
CUDA-graph replays without a gap; calls of over 15 ms and packed ones (which read their bounds on \
the host) by CUDA events around calls in a row, median of 5; at the packed length others are \
timed so, too. Packed: 13 sequences of 131 to 16,383 tokens in one row. Decoding: one token of 64 \
sequences, states taken in turn so that the L2 cache does not serve them; softmax attends to \
4,096 cached tokens. Memory: the most that was allocated during a call, inputs included. Bound: \
inputs and states read once and results written once at the speed of a large copy (backward: \
inputs read again), or softmax's and the block's products at the speed of a large bf16 product, \
whichever takes longer. Each implementation runs in a process of its own; the host library's \
autotuner chooses among each kernel's variants (where few are asked for, evenly spread over its \
list) at 16,384 tokens by timings of 10 ms a variant, and packed sequences keep to these. Calls \
that would take over a second are left out."""


class Options(NamedTuple):
    """What every worker is given."""

    tokens: tuple[int, ...]
    device: str
    commit: str | None
    variants: int = 0  # most of an autotuner's that are tried; 0: all


class Machine(NamedTuple):
    """What the first turn tells."""

    origin: dict[str, Any]  # of a run, as benchmarks.results has it
    rates: Rates


def worker(name: str, share: int, options: Options) -> Work:
    """Import and compile what a name needs, and measure it in its turns."""
    import logging

    logging.getLogger("torch.nested").setLevel(logging.ERROR)
    from benchmarks.mechanisms import working

    if name == MACHINE:
        yield Wait.TURN
        yield Machine(*working.machine(options.device, options.commit))
    elif name == "model":
        yield from working.model(share, ENTRIES[name].shares, options.variants, options.device)
    else:
        yield from working.operator(name, share, options.tokens, options.variants, options.device)


def measure(
    names: Sequence[str], options: Options, limit: float, keep: Callable[[MechanismsResults], None]
) -> MechanismsResults:
    """Run everything; `keep` is called with what there is after every row.

    Raises:
        SystemExit: the machine does not tell of itself.
    """
    started = time.monotonic()
    shares = [(MACHINE, 1)]
    on_gpu = options.device == "cuda"
    shares += [(name, ENTRIES[name].shares if on_gpu else 1) for name in names]
    found: list[Row | Trained | Missing] = []
    told_by: Machine | None = None
    for message in in_turns(worker, shares, options, limit):
        if isinstance(message, Machine):
            told_by = message
        elif isinstance(message, Lost):
            if message.name == MACHINE:
                break
            found.append(Missing(name=message.name, reason=message.reason))
            say(told(found[-1]))
        elif isinstance(message, (Row, Trained, Missing)):
            found.append(message)
            say(told(message))
        if told_by is not None:  # some may fail before the machine has its turn
            keep(results_of(told_by, found, options, limit, time.monotonic() - started))
    if told_by is None:
        raise SystemExit(f"the machine does not tell of itself: {message}")
    return results_of(told_by, found, options, limit, time.monotonic() - started)


def results_of(
    machine: Machine,
    found: Sequence[Row | Trained | Missing],
    options: Options,
    limit: float,
    seconds: float,
) -> MechanismsResults:
    """Return the run as far as it has come."""
    return MechanismsResults(
        **machine.origin,
        protocol=PROTOCOL,
        versions=dict(installed()),
        limit_seconds=limit,
        variants=options.variants,
        seconds=seconds,
        rates=machine.rates,
        rows=tuple(m for m in found if isinstance(m, Row)),
        trained=tuple(m for m in found if isinstance(m, Trained)),
        missing=tuple(m for m in found if isinstance(m, Missing)),
    )


def installed() -> Iterator[tuple[str, str]]:
    """Yield the packages of other people's implementations and their versions."""
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def told(message: Row | Trained | Missing) -> str:
    """Return a line about what a worker found."""
    if isinstance(message, Row):
        kind = "packed " if message.packed else ""
        return f"{message.name}, {message.way}, {kind}{message.tokens:,}: {message.ms:.3f} ms"
    if isinstance(message, Trained):
        return f"model, {message.setting}: {message.tokens_per_second:,.0f} tokens/s"
    return f"not measured: {message}"


def main() -> None:
    """Measure, write the file, and show the tables."""
    parser = commands.options(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths to measure")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds in all ({LIMIT:g})")
    parser.add_argument(
        "--variants",
        type=int,
        default=0,
        help="most that are tried of a host's kernel, for a short run (0: all)",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    # while others compile, what the library finds fastest is of no use: it shall not keep it
    os.environ["FLA_CACHE_RESULTS"] = "0"
    names = [name for name in ENTRIES if name in args.only]
    options = Options(tuple(sorted(args.tokens)), args.device, args.commit, args.variants)
    results = measure(names, options, args.limit, lambda found: write(args.out, found))
    print(tables(results))


if __name__ == "__main__":
    main()
