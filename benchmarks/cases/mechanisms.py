"""The cost of each sequence mixer: this project's, fla's, softmax attention and others.

    python -m benchmarks mechanisms --out benchmarks/h200/mechanisms.json

--only NAME ... selects mechanisms, --tokens N ... lengths. The file lists the calls that were not
measured. `--device cpu --tokens 256 --only quasar softmax` is a trial without a GPU. A file in
benchmarks/mechanisms adds a mechanism.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from importlib import metadata

import torch

from benchmarks.engine import clocks, commands, processes
from benchmarks.engine.comparison import CHECKED
from benchmarks.engine.mechanism_work import Work, entries
from benchmarks.engine.results import Entry, Run, start
from benchmarks.mechanisms import implementations
from quasar_kernels.mount import mount

TOKENS = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
SOAK_SECONDS = 0.3
"""Work before a process's first timing, so that the GPU has the clocks of sustained work."""

PROTOCOL = f"""\
bf16, one sequence, 8 heads of 64 channels (Mamba-2: a state of 64, B and C shared by the heads), \
log decays and step sizes in fp32, inputs as a fresh layer of each mechanism makes them. \
fla-core: its functions of these names, Mamba-2 by its simple GLA; softmax: torch's flash kernels, \
causal. Hybrid block: RWKV-6, Mamba-2 and Quasar in parallel over 512 channels with norms, fusion \
and MLP, fp32 weights under bf16 autocast. Each call is compared with float64 over its first 1,024 \
tokens. {CHECKED} Graph: median of 5 runs of CUDA-graph replays without a gap; calls of over 15 ms \
and packed ones by CUDA events around consecutive calls, median of 5. Packed: 13 sequences of 131 \
to 16,383 tokens in one row. Decoding: one token of 64 sequences, alternating states, which are \
not in the L2 cache; softmax attends to 4,096 cached tokens. Memory: the most that was allocated \
during a call, inputs included. Bound: inputs and states read once and results written once at the \
speed of a large copy (backward: inputs read again), or softmax's and the block's products at the \
speed of a large product, whichever takes longer. Each implementation runs in a fresh process. \
Calls that would take over a second are omitted."""


def machine(device: str, commit: str | None) -> Run:
    """Return a run without entries, with the GPU's rates, or rates of 1 without a GPU."""
    versions = {"fla-core": metadata.version("fla-core")}
    copies, products = 1.0, 1.0
    if device == "cuda":
        clocks.soak(SOAK_SECONDS)
        copies, products = clocks.copy_bandwidth(), clocks.product_tflops(torch.bfloat16)
    rates = {"copy_gb_per_s": copies, "product_tflops": products}
    return start("mechanisms", PROTOCOL, commit, device=device, versions=versions, settings=rates)


def implementation(name: str, tokens: Sequence[int], device: str) -> Iterator[Entry]:
    """Measure one implementation in this process."""
    import logging

    logging.getLogger("torch.nested").setLevel(logging.ERROR)
    mount()
    one = implementations()[name]
    if device == "cuda":
        clocks.soak(SOAK_SECONDS)
    work = Work(name, one.make(device), max(tokens), device)
    yield from entries(work, one.power, tokens)


def options(parser: argparse.ArgumentParser) -> None:
    names = list(implementations())
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths to measure")
    commands.device_option(parser)


def measure(args: argparse.Namespace) -> Iterator[Run]:
    began = time.monotonic()
    run: Run = processes.call(machine, args.device, args.commit)
    tokens = sorted(args.tokens)
    for name in (name for name in implementations() if name in args.only):
        try:
            for one in processes.stream(implementation, name, tokens, args.device):
                run = run.adding(one, seconds=time.monotonic() - began)
                yield run
        except processes.ProcessFailed as error:
            run = run.adding(Entry(table="calls", by=name, failure=str(error)))
            yield run


def bound_ms(run: Run, entry: Entry) -> float:
    """Return a lower bound of a call's time, from the speeds of a copy and of a large product."""
    by_memory = entry.figures["moved_bytes"] / run.number("copy_gb_per_s") / 1e6
    return max(by_memory, entry.figures["operations"] / run.number("product_tflops") / 1e9)
