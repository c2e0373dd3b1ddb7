"""The steps of a call of the layer, their kernels, and each step's floor, the least possible time.

Floors follow from counted bytes and floating-point operations at the validator's shapes, if each
input is read once and each output written once. Parameters and the states between segments, a few
MB, are omitted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.engine.results import Entry, Run, versions
from benchmarks.report.markdown import columns
from harness.workload import WORKLOAD

D, S = WORKLOAD.hidden_size, WORKLOAD.head_dim
N = WORKLOAD.num_heads * S
CHUNK = 16
"""Tokens of a chunk, for which the CUDA operator inverts a matrix I + M."""

NARROW = "gate's narrow half"
BYTES = {
    "x": 4 * D,
    "x bf16": 2 * D,
    "q": 2 * N,
    "k": 2 * N,
    "v": 2 * N,
    NARROW: 2 * S,
    "gate": 2 * N,
    "o": 2 * N,
    "normed": 2 * N,
    "y": 2 * D,
}
"""Bytes per token of each tensor that a step reads or writes."""

QKVG = "q, k, v and narrow gate"
FLOPS = {
    QKVG: 2 * D * (3 * N + S),
    "wide gate": 2 * S * N,
    # per head and token: three products with the state; within the chunk K K^T, Q K^T, and two
    # products with triangular matrices
    "outputs": 2 * N * (3 * S + 4 * CHUNK),
    "output": 2 * N * D,
}
"""Floating-point operations per token of each product."""

QKV = ("q", "k", "v")
PROJECTED = (*QKV, NARROW)
LAST = ("wide gate", "output")
TREES = {
    "overlay": "`FORK_SCOPE=layer`",
    "overlay-ops": "`FORK_SCOPE=ops`",
    "overlay-portable": "`FORK_SCOPE=layer` without Hopper's instructions",
}
"""How a profiled tree is named."""
# names of cuBLAS's kernels
GEMM = r"gemm|nvjet|cutlass|xmma|splitK"


class Step(NamedTuple):
    """A part of the call: its kernels' names, and the tensors and products that it needs."""

    what: str
    kernels: str  # pattern of their names
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    products: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes per token that must be moved."""
        return sum(BYTES[name] for name in (*self.reads, *self.writes))

    @property
    def flops(self) -> int:
        """Floating-point operations per token of its products."""
        return sum(FLOPS[name] for name in self.products)

    def floor_ms(self, profile: Run) -> float:
        """Return the longer of the bytes' and the arithmetic's times, at the measured rates."""
        copy, product = profile.number("copy_gb_per_s"), profile.number("product_tflops")
        return max(self.bounds_ms(profile.number("tokens"), copy * 1e9, product * 1e12))

    def bounds_ms(self, tokens: float, bandwidth: float, rate: float) -> tuple[float, float]:
        """Return the times of the bytes and of the arithmetic at rates per second."""
        return self.bytes / bandwidth * tokens * 1e3, self.flops / rate * tokens * 1e3


# Segment maps and their scan have no floor: a sequential pass over the tokens would not need them.
OPERATOR = (
    Step("operator: maps of the segments", r"segment_map"),
    Step("operator: scan over the maps", r"segment_scan"),
    Step("operator: outputs", r"segment_output", QKV, ("o",), ("outputs",)),
)

STEPS = {
    "overlay": (
        Step("parameters cast and packed", r"pack_weights|multi_tensor_apply|CatArray"),
        Step(
            "projections, convolution, SiLU",
            r"quasar_(resident_)?projection",
            ("x",),
            PROJECTED,
            (QKVG,),
        ),
        Step("x to bf16", r"bfloat16_copy", ("x",), ("x bf16",)),
        Step("projections of q, k, v and the gate", GEMM, ("x bf16",), PROJECTED, (QKVG,)),
        Step("gate's narrow half copied", r"direct_copy", (NARROW,), (NARROW,)),
        Step("convolution and SiLU", r"conv", QKV, QKV),
        *OPERATOR,
        Step("gate widened, norm", r"gate_and_norm", ("o", NARROW), ("normed",), ("wide gate",)),
        Step(
            "gate, norm, output projection",
            r"gated_output|resident_output",
            ("o", NARROW),
            ("y",),
            LAST,
        ),
        Step("output projection", GEMM, ("normed",), ("y",), ("output",)),
    ),
    "overlay-ops": (
        Step(
            "x, four times, and parameters to bf16", r"bfloat16_copy", ("x",) * 4, ("x bf16",) * 4
        ),
        Step(
            "six products: q, k, v, gate (two), output",
            GEMM,
            ("x bf16",) * 4 + (NARROW, "normed"),
            (*PROJECTED, "gate", "y"),
            (QKVG, *LAST),
        ),
        Step("convolutions and SiLU", r"conv", QKV, QKV),
        *OPERATOR,
        Step("gated norm", r"layer_norm_gated", ("o", "gate"), ("normed",)),
    ),
}
"""The steps of the layer by tree, in the order of their first launch."""

STEPS["overlay-portable"] = STEPS["overlay"]

OTHER = Step("other", "")


class StepTime(NamedTuple):
    """A step, the number of its launches, and their total time."""

    step: Step
    kernels: tuple[str, ...]
    launches: int
    ms: float


def find_steps(launches: Sequence[Entry], steps: Sequence[Step]) -> list[StepTime]:
    """Assign each launch to the step with a pattern that matches its name, or to `OTHER`.

    If several steps match, as for products, the launch belongs to the first match that is not
    before the last step so far. Steps without launches are omitted.
    """
    reached, assigned = 0, []
    for launch in launches:
        fitting = [
            i for i, step in enumerate(steps) if re.search(step.kernels, str(launch.of["kernel"]))
        ]
        at = next((i for i in fitting if i >= reached), fitting[0] if fitting else None)
        reached = max(reached, at or 0)
        assigned.append((OTHER if at is None else steps[at], launch))
    times = []
    for step in (*steps, OTHER):
        mine = [launch for owner, launch in assigned if owner is step]
        if mine:
            names = tuple(dict.fromkeys(short_name(str(launch.of["kernel"])) for launch in mine))
            ms = sum(launch.figures["ms"] for launch in mine)
            times.append(StepTime(step, names, len(mine), ms))
    return times


def short_name(kernel: str) -> str:
    """Strip return type, namespaces, template and call arguments from a kernel's name."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name, maxsplit=1)[0].strip().split("::")[-1] or kernel


COLUMNS = {
    "step": "{step}",
    "kernels": "{kernels}",
    "launches": "{launches}",
    "ms": "{ms:.3f}",
    "share": "{ms/call_ms:.1%}",
    "GB": "{moved:G.2f}",
    "TFLOP": "{flops:T.2f}",
    "floor, ms": "{floor_ms:.2f}",
    "of floor": "{floor_ms/ms:.0%}",
}


def profile_table(profile: Run) -> str:
    """Return the table of a call's time by step, with each step's floor."""
    tokens, call_ms = int(profile.number("tokens")), profile.number("call_ms")
    tree, environment = str(profile.settings["tree"]), profile.environment
    rows: list[dict[str, Any]] = [
        {
            "step": step.what,
            "kernels": ", ".join(f"`{name}`" for name in names),
            "launches": launches,
            "ms": ms,
            "call_ms": call_ms,
            "moved": step.bytes * tokens or None,
            "flops": step.flops * tokens or None,
            "floor_ms": step.floor_ms(profile) or None,
        }
        for step, names, launches, ms in find_steps(profile.entries, STEPS[tree])
    ]
    busy = sum(launch.figures["ms"] for launch in profile.entries)
    whole = {
        "step": "all kernels",
        "launches": len(profile.entries),
        "ms": busy,
        "call_ms": call_ms,
        "floor_ms": sum(row["floor_ms"] or 0.0 for row in rows),
    }
    where = f"{profile.gpu}, {versions(environment)}" if environment else profile.gpu
    return (
        f"{TREES[tree]} ({profile.created}, commit {profile.commit}, {where}): a call "
        f"of {tokens:,} tokens takes {call_ms:.3f} ms in the validator's loop. By "
        f"kernel, medians of {profile.settings['calls']} profiled calls; the call's time "
        f"minus their sum is {call_ms - busy:+.3f} ms. The floor is the longer of moving a step's "
        "tensors once at the bandwidth of a copy "
        f"({profile.number('copy_gb_per_s') / 1e3:.2f} TB/s) and its operations at the rate of a "
        f"large bf16 product ({profile.number('product_tflops'):.0f} TFLOP/s), both measured in "
        "the same run.\n\n" + columns([*rows, whole], COLUMNS)
    )
