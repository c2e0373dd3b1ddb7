"""Profile the kernels of one call of the operator and of the layer with Nsight Compute, on a GPU.

    python -m benchmarks.nsight.profile --out benchmarks/h200/profile.json [--tokens 1000000]

The ceilings, a large copy and large products, are measured first in this process. Then each call
runs in a process of its own below `ncu`, which must be on PATH and may read the GPU's counters; the
clocks are left alone. benchmarks.report makes the document's tables from the file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.engine import clocks, commands
from benchmarks.nsight.results import METRICS, CallProfile, Profile, parse
from benchmarks.operator.implementations import selected
from benchmarks.results import origin, write
from harness.tuning.inputs import layer_like
from harness.worker.subject.timing import recording
from harness.workload import WORKLOAD
from quasar_kernels.mount import mount

PROTOCOL = """\
Nsight Compute, clocks left alone, caches emptied before each kernel, kernels one at a time. \
Operator: chunk_quasar with QUASAR_BACKEND=cuda, B = 1, H = 8, S = 64, bf16, inputs as a layer \
with default weights makes them. Layer: QuasarAttention(512, head_dim=64, num_heads=8) on fp32 \
input under bf16 autocast, gradients recorded. Each call runs three times before the one that is \
profiled. Copy: 1 GiB on the device, both directions counted; products: of 8192 x 8192 matrices; \
both by CUDA-graph replays at the clocks of sustained work."""


def operator_call(tokens: int) -> tuple[Callable[[], object], int]:
    """Return a call of the operator, and the bytes of q, k, v and o."""
    inputs = layer_like(tokens)

    def call() -> None:
        with torch.no_grad(), selected("cuda") as run:
            run(*inputs)

    return call, 4 * inputs[0].numel() * inputs[0].element_size()


def layer_call(tokens: int) -> tuple[Callable[[], object], int]:
    """Return a forward pass of the layer, and the bytes of its input and output."""
    from fla.layers.quasar import QuasarAttention

    layer = QuasarAttention(**WORKLOAD.layer_arguments()).cuda()
    x = torch.randn(WORKLOAD.batch_size, tokens, WORKLOAD.hidden_size, device="cuda")

    def call() -> None:
        with recording(x.device):
            layer(x)

    return call, (4 + 2) * x.numel()


CALLS = {"operator": operator_call, "layer": layer_call}


def run_call(name: str, tokens: int) -> None:
    """Run one call, let the profiler see the last time only, and print the least bytes."""
    mount()
    torch.manual_seed(0)
    call, least_bytes = CALLS[name](tokens)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    print(f"least bytes: {least_bytes}")


def profile_call(name: str, tokens: int) -> CallProfile:
    """Run `run_call` below ncu, and read what it saw.

    Raises:
        SystemExit: ncu failed; its words follow.
        ValueError: as `profile_results.parse`.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        done = subprocess.run(
            [
                "ncu", "--clock-control", "none", "--profile-from-start", "off",
                "--csv", "--page", "raw", "--print-units", "base",
                "--metrics", ",".join(METRICS), "--log-file", str(log),
                *commands.python("benchmarks.nsight.profile", "--call", name, tokens),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        said = log.read_text() if log.exists() else ""
    found = re.search(r"^least bytes: (\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        sys.exit(f"ncu ended with status {done.returncode}:\n{said[-2000:]}\n{done.stderr[-2000:]}")
    return CallProfile(tokens=tokens, least_bytes=int(found[1]), kernels=tuple(parse(said)))


def product_rates() -> dict[str, float]:
    """Return the rates of large products, TFLOP/s, by operands; torch's default is put back."""
    torch.backends.cuda.matmul.allow_tf32 = True
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
    try:
        return {kind: clocks.product_tflops(dtype) for kind, dtype in kinds.items()}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def main() -> None:
    """Measure the ceilings, profile the calls and write the file."""
    if sys.argv[1:2] == ["--call"]:  # what profile_call starts
        run_call(sys.argv[2], int(sys.argv[3]))
        return
    parser = commands.options(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    args = parser.parse_args()
    version = commands.tool_version("ncu", "the CUDA toolkit, or as Nsight Compute")
    with torch.no_grad():
        clocks.soak(1)
        copy, rates = clocks.copy_bandwidth(), product_rates()
    clocks.free()
    profile = Profile(
        **origin(args.commit),
        protocol=PROTOCOL,
        ncu=version,
        copy_gb_per_s=copy,
        product_tflops=rates,
        calls={name: profile_call(name, args.tokens) for name in CALLS},
    )
    write(args.out, profile)


if __name__ == "__main__":
    main()
