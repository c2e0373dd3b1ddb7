"""Measure the operator's forward pass and decoding beside flash-linear-attention's, in one run.

    python -m benchmarks.operator.inference --out benchmarks/h200/operator.json [--without cuda]

Speed, accuracy against float64, what stopping early gains, memory, decoding and the first call with
empty kernel caches; about four minutes on an H200. --quick leaves the peer and its tuning out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.engine import clocks, commands
from benchmarks.engine.clocks import eager_ms, free, graph_ms, rested_ms
from benchmarks.engine.commands import say
from benchmarks.engine.limits import missed
from benchmarks.operator.implementations import (
    Operator,
    add_choice,
    chosen,
    decoders,
    peer_version,
    selected,
    timing,
)
from benchmarks.operator.results import (
    Accuracy,
    Decoding,
    Error,
    FirstCall,
    Forgetting,
    Memory,
    OperatorResults,
    Speed,
    Timing,
    operator_criteria,
)
from benchmarks.results import origin, write
from harness.tuning import inputs as made
from harness.tuning.inputs import Inputs, layer_like
from harness.worker.compare import figures
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, quasar_recurrence, relative_rms

LENGTHS = (2048, 16_384, 100_000, 262_144, 1_000_000)
FORGETTING_LENGTHS, SLOW_HEADS = (200_000, 1_000_000), (0, 1, 2, 8)
BATCHES = (1, 8, 32, 128)
FIRST_CALL_TOKENS = 100_000

PROTOCOL = """\
B = 1, H = 8, S = 64, bf16, inputs as a layer with default weights makes them. Triton and CUDA: \
chunk_quasar without gradients, step size included, with QUASAR_BACKEND of that name. Peer: \
chunk_delta_rule with scale 1 and the step size computed by torch, which is timed too. Each \
output is compared with the float64 chunk form before it is timed. The GPU is warmed with matrix \
products first, and each call runs for 0.2 s before it is timed, so that the clocks are those of \
sustained work. Graph: median of 11 runs of CUDA-graph replays without a gap; from rest: 0.3 s \
without work, three replays, then ten that are timed, as validators time a layer, median of 5; \
eager: the host's clock between synchronizes around calls in a row. Forgetting: CUDA alone; \
keys are noise in all directions, beta is 1, and 0.001 in slow heads. Decoding: one token, many \
states taken in turn so that the L2 cache does not serve them, ours updated in place; the peer is \
given its step size and writes a new state into storage that its allocator uses again; the copy \
is of such states, also in turn, the faster of the driver's and of an elementwise kernel. First \
call: 100,000 tokens, a fresh process, empty caches; CUDA's with an empty PATH, so without any \
compiler but torch's own."""


def output_error(name: str, inputs: Inputs, expected: Tensor) -> Error:
    """Compare an output, its storage poisoned beforehand, with the float64 result."""
    clocks.poison()
    with selected(name) as run:
        o = run(*inputs)
    found = figures(o, expected)
    return Error(overall=found.relative_rms, worst_eighth=found.worst_part)


def measure_forward(names: Sequence[str]) -> tuple[list[Accuracy], list[Speed], Memory]:
    """Check, then time, every length; the memory is that of the longest."""
    accuracy, speed = [], []
    for tokens in LENGTHS:
        inputs = layer_like(tokens)
        for keys, noise in {"layer-like": None, **made.NOISE}.items():
            used = inputs if noise is None else made.correlated(inputs, noise)
            expected = quasar_chunked(*used, chunk=128)[0]
            checked = [n for n in names if noise is None or n != "peer"]
            errors = {n: output_error(n, used, expected) for n in checked}
            accuracy.append(Accuracy(tokens=tokens, keys=keys, errors=errors))
            del expected, used
            free()
        peaks, times = {}, {}
        for name in names:
            with selected(name) as run:
                peaks[name] = peak_bytes(run, inputs)
                times[name] = timing(partial(run, *inputs), rested=name == "cuda")
        speed.append(Speed(tokens=tokens, times=times))
        output_bytes = inputs[0].numel() * inputs[0].element_size()
        memory = Memory(tokens=tokens, output_bytes=output_bytes, peak_bytes=peaks)
        del inputs
        free()
        say(f"forward of {tokens} tokens")
    return accuracy, speed, memory


def measure_forgetting() -> list[Forgetting]:
    """Check and time the CUDA forward pass where heads forget, and without making use of it."""
    from fla.ops.quasar.cuda.scan import forward as cuda_scan

    rows = []
    for tokens in FORGETTING_LENGTHS:
        for slow in SLOW_HEADS:
            inputs = made.forgetting(tokens, slow)
            error = output_error("cuda", inputs, quasar_chunked(*inputs, chunk=128)[0]).overall
            free()
            with selected("cuda") as run:
                call = partial(run, *inputs)
                times = graph_ms(call), rested_ms(call)
                with patch.object(cuda_scan, "LONG", sys.maxsize):  # pass 1 never stops
                    full = graph_ms(call), rested_ms(call)
            rows.append(
                Forgetting(
                    tokens=tokens, slow_heads=slow, error=error, graph_ms=times[0],
                    rested_ms=times[1], full_graph_ms=full[0], full_rested_ms=full[1],
                )
            )  # fmt: skip
            del inputs, call
            free()
    say("forgetting")
    return rows


def peak_bytes(run: Operator, inputs: Inputs) -> int:
    """Return the most memory that a call holds beside its inputs."""
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_decoding(names: Sequence[str]) -> list[Decoding]:
    """Check and time one token at several batch sizes, and copies of the states beside it."""
    rows = []
    for batch in BATCHES:
        inputs = layer_like(1, batch)
        shape = (batch, made.HEADS, made.WIDTH, made.WIDTH)
        state = torch.randn(shape, device="cuda")
        sets = clocks.states_in_turn(state.nbytes)
        expected = quasar_recurrence(*inputs, state)[0]
        calls = {n: call for n, call in decoders(inputs).items() if n in names}
        errors = {n: relative_rms(call(state.clone())[0], expected) for n, call in calls.items()}
        states = [state.clone() for _ in range(sets)]
        targets = [torch.empty_like(state) for _ in range(sets)]
        times = {}
        for name, call in calls.items():
            turns = [partial(call, s) for s in states]
            times[name] = Timing(graph_ms=graph_ms(turns), eager_ms=eager_ms(turns))
        rows.append(
            Decoding(
                batch=batch, state_bytes=4 * state.numel(), sets=sets, times=times,
                copy_ms=clocks.copy_ms(states, targets), errors=errors,
            )
        )  # fmt: skip
    say("decoding")
    return rows


def first_call(name: str) -> FirstCall:
    """Import and call an implementation in this process, which has not compiled anything."""
    torch.manual_seed(0)
    inputs = layer_like(FIRST_CALL_TOKENS)
    torch.cuda.synchronize()
    start = time.perf_counter()
    mount()
    if name == "peer":
        import fla.ops.delta_rule
    else:
        import fla.ops.quasar  # noqa: F401
    imported = time.perf_counter()
    with torch.no_grad(), selected(name) as run:
        run(*inputs)
    torch.cuda.synchronize()
    done = time.perf_counter()
    return FirstCall(import_seconds=imported - start, call_seconds=done - imported)


def cold_first_call(name: str, caches: Path) -> FirstCall:
    """Run `first_call` in a fresh process whose caches are below an empty folder."""
    command = commands.python("benchmarks.operator.inference", "--first-call", name)
    environ = os.environ | cache_environment(caches)
    if name == "cuda":  # Triton needs a C compiler; what NVRTC compiles must do without
        environ["PATH"] = str(caches)
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    say(f"first call of the {name}")
    return FirstCall.model_validate_json(done.stdout.splitlines()[-1])


def cache_environment(folder: Path) -> dict[str, str]:
    """Return the variables that put every kernel cache below `folder`."""
    names = ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH", "QUASAR_CACHE_DIR")
    return {name: str(folder / name.lower()) for name in names}


def measure(names: Sequence[str], caches: Path, commit: str | None) -> OperatorResults:
    """Run everything; the fresh processes come first, while this one holds no memory."""
    first_calls = {name: cold_first_call(name, caches / name) for name in names}
    # what the last of them, the peer, has tuned already serves this process too
    os.environ.update(cache_environment(caches / names[-1]))
    mount()
    torch.manual_seed(0)
    with torch.no_grad():
        clocks.soak(2)
        decoding = measure_decoding(names)
        copy = clocks.copy_bandwidth()
        free()
        accuracy, forward, memory = measure_forward(names)
        forgetting = measure_forgetting() if "cuda" in names else []
    return OperatorResults(
        **origin(commit),
        protocol=PROTOCOL,
        peer=peer_version(names),
        copy_gb_per_s=copy,
        forward=tuple(forward),
        forgetting=tuple(forgetting),
        accuracy=tuple(accuracy),
        memory=memory,
        decoding=tuple(decoding),
        first_call=first_calls,
    )


def main() -> None:
    """Measure, write the file, and say which figures miss their limits."""
    if sys.argv[1:2] == ["--first-call"]:  # what cold_first_call starts
        print(first_call(sys.argv[2]).model_dump_json())
        return
    args = add_choice(commands.options(__doc__)).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(chosen(args), Path(folder), args.commit)
    write(args.out, results)
    for miss in missed(operator_criteria(results)):
        print(f"misses its limit: {miss}")


if __name__ == "__main__":
    main()
