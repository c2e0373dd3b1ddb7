"""What each kernel of the layer's call is for, and the least time that it could take.

Bytes and floating-point operations are counted from the validator's shapes, here and nowhere else:
each input is read once, each output written once. The parameters and the states between segments,
a few MB, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.layer.results import Launch, LayerProfile
from benchmarks.report.markdown import records
from benchmarks.results import versions
from harness.workload import WORKLOAD

D, S = WORKLOAD.hidden_size, WORKLOAD.head_dim
N = WORKLOAD.num_heads * S
CHUNK = 16
"""Tokens whose inverse the CUDA operator takes at once."""

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
"""Bytes a token of every tensor that a step may read or write."""

QKVG = "q, k, v and narrow gate"
FLOPS = {
    QKVG: 2 * D * (3 * N + S),
    "wide gate": 2 * S * N,
    # per head and token: three products with the state's columns; with the chunk's tokens K K^T,
    # Q K^T, and two products with the triangular matrices
    "outputs": 2 * N * (3 * S + 4 * CHUNK),
    "output": 2 * N * D,
}
"""Floating-point operations a token of every product."""

QKV = ("q", "k", "v")
PROJECTED = (*QKV, NARROW)
LAST = ("wide gate", "output")
TREES = {"overlay": "layer", "overlay-ops": "ops"}
# cuBLAS's names
GEMM = r"gemm|nvjet|cutlass|xmma|splitK"


class Step(NamedTuple):
    """A part of the call: the kernels that do it by name, and what they must do at least."""

    what: str
    kernels: str  # pattern of their names
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    products: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes a token that must be moved."""
        return sum(BYTES[name] for name in (*self.reads, *self.writes))

    @property
    def flops(self) -> int:
        """Floating-point operations a token of its products."""
        return sum(FLOPS[name] for name in self.products)

    def floor_ms(self, profile: LayerProfile) -> float:
        """Return the longer of moving the bytes and doing the arithmetic, at the rates measured."""
        moving = self.bytes / (profile.copy_gb_per_s * 1e6)
        computing = self.flops / (profile.product_tflops * 1e9)
        return max(moving, computing) * profile.tokens


# maps and their scan have no floor: one walk over the tokens, from the first on, needs neither
OPERATOR = (
    Step("operator: maps of the segments", r"segment_map"),
    Step("operator: scan over the maps", r"segment_scan"),
    Step("operator: outputs", r"segment_output", QKV, ("o",), ("outputs",)),
)

STEPS = {
    "overlay": (
        Step("parameters cast and packed", r"pack_weights|multi_tensor_apply|CatArray"),
        Step("projections, convolution, SiLU", r"quasar_projection", ("x",), PROJECTED, (QKVG,)),
        Step("x to bf16", r"bfloat16_copy", ("x",), ("x bf16",)),
        Step("projections of q, k, v and the gate", GEMM, ("x bf16",), PROJECTED, (QKVG,)),
        Step("gate's narrow half set apart", r"direct_copy", (NARROW,), (NARROW,)),
        Step("convolution and SiLU", r"conv", QKV, QKV),
        *OPERATOR,
        Step("gate widened, norm", r"gate_and_norm", ("o", NARROW), ("normed",), ("wide gate",)),
        Step("gate, norm, output projection", r"gated_output", ("o", NARROW), ("y",), LAST),
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

OTHER = Step("other", "")


class Found(NamedTuple):
    """A step, the launches that it took, and their time."""

    step: Step
    kernels: tuple[str, ...]
    launches: int
    ms: float


def find_steps(launches: Sequence[Launch], steps: Sequence[Step]) -> list[Found]:
    """Give each launch to a step that its name fits, and to `OTHER` where it fits none.

    Where it fits several, as products do, it goes to the first that is not before a step that has
    had a launch already. Steps without launches are left out.
    """
    reached, taken = 0, []
    for launch in launches:
        fitting = [i for i, step in enumerate(steps) if re.search(step.kernels, launch.kernel)]
        at = next((i for i in fitting if i >= reached), fitting[0] if fitting else None)
        reached = max(reached, at or 0)
        taken.append((OTHER if at is None else steps[at], launch))
    found = []
    for step in (*steps, OTHER):
        mine = [launch for owner, launch in taken if owner is step]
        if mine:
            names = tuple(dict.fromkeys(short_name(launch.kernel) for launch in mine))
            found.append(Found(step, names, len(mine), sum(launch.ms for launch in mine)))
    return found


def short_name(kernel: str) -> str:
    """Cut return type, template and call arguments off a kernel's name, and its namespaces."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name, maxsplit=1)[0].strip().split("::")[-1] or kernel


def profile_table(profile: LayerProfile) -> str:
    """Return where a call's time goes, step by step, beside the least that each step must do."""

    def line(
        what: str, kernels: str, launches: int, ms: float, moved: int, flops: int, floor: float
    ) -> dict[str, str]:
        return {
            "step": what,
            "kernels": kernels,
            "launches": str(launches),
            "ms": f"{ms:.3f}",
            "share": f"{ms / profile.call_ms:.1%}",
            "GB": f"{moved / 1e9:.2f}" if moved else "",
            "TFLOP": f"{flops / 1e12:.2f}" if flops else "",
            "floor, ms": f"{floor:.2f}" if floor else "",
            "of floor": f"{floor / ms:.0%}" if floor else "",
        }

    rows, least = [], 0.0
    for step, names, launches, ms in find_steps(profile.launches, STEPS[profile.tree]):
        floor = step.floor_ms(profile)
        least += floor
        kernels = ", ".join(f"`{name}`" for name in names)
        moved, flops = step.bytes * profile.tokens, step.flops * profile.tokens
        rows.append(line(step.what, kernels, launches, ms, moved, flops, floor))
    busy = sum(launch.ms for launch in profile.launches)
    idle = profile.call_ms - busy
    rows.append(line("all kernels", "", len(profile.launches), busy, 0, 0, least))
    return (
        f"`FORK_SCOPE={TREES[profile.tree]}` ({profile.created}, commit {profile.commit}, "
        f"{profile.environment.gpu}, {versions(profile.environment)}): a call "
        f"of {profile.tokens:,} tokens takes {profile.call_ms:.3f} ms in the validator's loop. By "
        f"kernel, medians of {profile.calls} profiled calls; what they sum to differs from that by "
        f"{idle:+.3f} ms. The floor is the longer of moving a step's tensors once at the "
        f"bandwidth of a copy ({profile.copy_gb_per_s / 1e3:.2f} TB/s) and its operations at the "
        f"rate of a large bf16 product ({profile.product_tflops:.0f} TFLOP/s), both measured "
        "in the same run.\n\n" + records(rows)
    )
