"""Small calls of the CUDA kernels, for a tool that watches them; each is compared with float64.

    python -m benchmarks.cases.sanitizer_calls PART...

A PART is a key of CASES (add a case there to check another call), or a control of
sanitizer_controls.cu. `memcheck`, `racecheck` and `initcheck` run a fault for that tool,
`handshake` a correct kernel. The exit status is 1 if a result is wrong. --limit ends the process
after that many seconds in any case; --clear is for a tool that does not track bulk stores.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from harness.workload import WORKLOAD
from quasar_kernels.mount import mount
from quasar_kernels.reference import quasar_chunked, quasar_layer, relative_rms

TOOLS = ("memcheck", "racecheck", "initcheck")
"""compute-sanitizer's tools that are used."""

PORTABLE = ("-DQUASAR_NO_WGMMA",)
"""NVRTC options that disable wgmma on a Hopper GPU, to run the code for other GPUs."""

LIMIT = 1e-2
"""Relative RMS error above which a result is wrong; the kernels' tests are stricter."""


class OperatorCase(NamedTuple):
    """One call of the operator; `lengths` of several sequences are packed in one row."""

    lengths: tuple[int, ...]
    batch: int = 1
    heads: int = 2
    width: int = 64
    dtype: torch.dtype = torch.bfloat16
    states: bool = False  # the call has initial states and returns the final ones
    segments: int | None = None  # of each sequence; a segment has many tiles if there are few
    gradients: bool = False  # whether the backward pass runs, too
    options: tuple[str, ...] = ()  # of NVRTC


class LayerCase(NamedTuple):
    """One forward pass of the layer that a validator times, under autocast to `dtype`."""

    tokens: int
    dtype: torch.dtype = torch.bfloat16
    gradients: bool = False  # whether autograd records the pass, as in a validator's call
    multiprocessors: int | None = None  # the most to use; with few of them each computes many tiles
    portable: bool = False  # by the fused kernels for GPUs without Hopper's instructions
    options: tuple[str, ...] = ()  # of NVRTC


class SliceCase(NamedTuple):
    """One packed row, shared by several ranks; the ranks are computed one after another."""

    lengths: tuple[int, ...]  # of the sequences
    ranks: tuple[int, ...]  # tokens of each rank
    heads: int = 2
    width: int = 64
    dtype: torch.dtype = torch.bfloat16


OPERATOR = (
    OperatorCase((1,)),
    OperatorCase((65,), states=True),
    OperatorCase((777,), batch=2, heads=3, states=True),
    OperatorCase((1029,), dtype=torch.float16, states=True),
    OperatorCase((1029,), states=True, segments=2),
    OperatorCase((2600,), states=True, segments=2),  # long enough for pass 1 to stop early
    OperatorCase((0, 1, 200, 64, 0, 331), states=True),
    OperatorCase((63, 130), dtype=torch.float16),
    OperatorCase((333,), width=128, states=True),
    OperatorCase((0, 65, 200), width=128, dtype=torch.float16, states=True),
    OperatorCase((650,), states=True, options=PORTABLE),
    OperatorCase((333,), width=128, options=PORTABLE),
    OperatorCase((650,), dtype=torch.float16, states=True, options=PORTABLE),
    OperatorCase((1,), gradients=True),
    OperatorCase((333,), batch=2, heads=3, states=True, gradients=True),
    OperatorCase((650,), states=True, segments=3, gradients=True),
    OperatorCase((0, 1, 200, 64, 0, 331), dtype=torch.float16, states=True, gradients=True),
    OperatorCase((650,), width=128, states=True, segments=3, gradients=True),
    OperatorCase((0, 65, 200), width=128, dtype=torch.float16, gradients=True),
    OperatorCase((333,), states=True, segments=2, gradients=True, options=PORTABLE),
)
LAYER = (
    LayerCase(1),
    LayerCase(333),
    LayerCase(1029, torch.float16),
    LayerCase(777, gradients=True),
    LayerCase(1029, multiprocessors=2),
    LayerCase(777, torch.float16, multiprocessors=2),
)
TWO_GROUPS = ("-DQUASAR_GROUPS=2",)
"""NVRTC options that give a block two groups of warps, as on GPUs with 99 KB of shared memory."""
PORTABLE_LAYER = (
    LayerCase(1, portable=True),
    LayerCase(333, torch.float16, portable=True),
    LayerCase(1029, multiprocessors=2, portable=True),
    LayerCase(1, portable=True, options=TWO_GROUPS),
    LayerCase(333, torch.float16, portable=True, options=TWO_GROUPS),
    LayerCase(1029, multiprocessors=2, portable=True, options=TWO_GROUPS),
)
SLICES = (
    SliceCase((700,), (350, 350)),
    SliceCase((130, 670, 50, 250), (300, 70, 330, 400), dtype=torch.float16),
    SliceCase((400,), (256, 144), width=128),
)


class WideCase(NamedTuple):
    """One projection by the kernel for wide layers."""

    tokens: int
    inputs: int = 128
    channels: int = 256  # of q, k and v together
    narrow: int = 64
    dtype: torch.dtype = torch.bfloat16
    multiprocessors: int | None = None  # as in LayerCase


WIDE = (
    WideCase(1),
    WideCase(333),
    WideCase(777, inputs=256, channels=768, narrow=128, dtype=torch.float16),
    WideCase(1029, inputs=192, channels=768, multiprocessors=2),
)

CONTROLS = Path(__file__).with_name("sanitizer_controls.cu")
PLANTED, HANDSHAKE = "quasar_planted", "quasar_handshake"


def run_control(kernel: str, fault: int) -> None:
    """Run a kernel of CONTROLS, and check the result of the one without faults."""
    from fla.ops.quasar.cuda.driver import load_kernels
    from fla.ops.quasar.cuda.nvrtc import compile_cached

    capability = torch.cuda.get_device_capability()
    code = compile_cached("sanitizer_controls", CONTROLS.read_text(), {}, capability)
    loaded = load_kernels([code], [kernel], 0)[kernel]
    x = torch.empty(64, device="cuda") if kernel == PLANTED else torch.randn(1056).cuda()
    before = x.clone() if kernel == HANDSHAKE else None
    address, number = ctypes.c_void_p(x.data_ptr()), ctypes.c_int(fault)
    parameters = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(number))
    loaded.launch((1, 1), parameters)
    torch.cuda.synchronize()
    if before is not None:
        sums = before[:1024].view(8, 32, 4)[..., 0].sum(0).roll(-5)
        torch.testing.assert_close(x[1024:], sums)


def operator_error(case: OperatorCase) -> float:
    """Run a case of the operator and return the largest relative error of its results."""
    from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
    from fla.ops.quasar.operator_types import ScanInputs

    cuda_scan.LONG = 1024  # so that pass 1 may stop early in segments this short too
    T, N = sum(case.lengths), len(case.lengths)
    shape = (case.batch, T, case.heads, case.width)
    q, k, v = (torch.randn(shape).mul(0.3).to(case.dtype) for _ in range(3))
    beta = torch.rand(case.heads) + 0.5
    bounds = torch.tensor([0, *case.lengths]).cumsum(0) if N > 1 else None
    sequences = case.batch if bounds is None else N
    initial = torch.randn(sequences, case.heads, case.width, case.width) if case.states else None
    inputs = [q, k, v, beta, *([] if initial is None else [initial])]
    leaves = [x.double().requires_grad_(case.gradients) for x in inputs]
    start = None if initial is None else leaves[4]
    expected, state = quasar_chunked(leaves[0], leaves[1], leaves[2], leaves[3], start, bounds)
    on_gpu = [None if x is None else x.cuda() for x in (q, k, v, beta, initial)]
    cu = None if bounds is None else bounds.cuda()
    program = cuda_scan.PROGRAM.load(cuda_scan.variant_of(on_gpu[0], case.options))
    call = ScanInputs.of(*on_gpu[:4])._replace(initial_state=on_gpu[4], cu_seqlens=cu)
    result = cuda_scan.forward(call, case.states, segments=case.segments, program=program)
    error = relative_rms(result.o.cpu(), expected)
    if case.states:
        error = max(error, relative_rms(result.final_state.cpu(), state))
    if case.gradients:
        d_o, d_state = torch.randn(shape).to(case.dtype), torch.randn_like(state)
        d_state *= case.states  # without states the call returns no final state
        torch.autograd.backward([expected, state], [d_o.double(), d_state])
        d_final = d_state.float().cuda() if case.states else None
        arguments = result.saved, d_o.cuda(), d_final
        error = max(error, gradient_error(case, arguments, [x.grad for x in leaves]))
    return error


def gradient_error(
    case: OperatorCase, arguments: Sequence[Any], wanted: Sequence[torch.Tensor | None]
) -> float:
    """Run the backward pass on `arguments` and return its gradients' largest relative error."""
    from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd

    program = cuda_scan_bwd.PROGRAM.load(
        cuda_scan_bwd.variant_of(arguments[0].inputs.q, case.options)
    )
    gradients = cuda_scan_bwd.backward(*arguments, program=program)
    pairs = [(x.cpu(), y) for x, y in zip(gradients, wanted, strict=False) if y is not None]
    errors = [relative_rms(x, y) for x, y in pairs]
    errors[3] /= 3  # beta's terms cancel over the tokens
    return max(errors)


def layer_error(case: LayerCase) -> float:
    """Run a case of the layer and return its output's relative error.

    Raises:
        CudaUnavailableError: the fused kernels did not compute the case.
    """
    from fla.layers import quasar
    from fla.ops.quasar.cuda.program import Variant
    from fla.ops.quasar.layer import hopper, paths, portable

    kernels = portable if case.portable else hopper
    variant = Variant(torch.cuda.current_device(), case.dtype, case.options)
    program = kernels.PROGRAM.load(variant)
    if case.multiprocessors:
        program = program._replace(multiprocessors=case.multiprocessors)
    # so that the layer's kernels also run for short sequences
    paths.choose = lambda *_: paths.Path(kernels, program)
    paths.Path.failed = raise_error
    layer = quasar.QuasarAttention(**WORKLOAD.layer_arguments())
    x = torch.randn(1, case.tokens, WORKLOAD.hidden_size)
    H, S = WORKLOAD.num_heads, WORKLOAD.head_dim
    with torch.no_grad():
        expected = quasar_layer(layer.state_dict(), x, num_heads=H, head_dim=S)
    recorded = nullcontext() if case.gradients else torch.no_grad()
    with recorded, torch.autocast("cuda", case.dtype):
        y, _, _ = layer.cuda()(x.cuda())
    return relative_rms(y.detach().cpu(), expected)


def raise_error(_path: object, error: Exception, _call: object) -> None:
    """Raise the error after which the layer would use other kernels."""
    raise error


def wide_error(case: WideCase) -> float:
    """Run a case of the wide projection and return the largest relative error of its results."""
    from fla.ops.quasar.cuda.program import Variant
    from fla.ops.quasar.layer.wide import PROGRAM, project_wide

    program = PROGRAM.load(Variant(torch.cuda.current_device(), case.dtype))
    if case.multiprocessors:
        program = program._replace(multiprocessors=case.multiprocessors)
    C = case.channels
    x = torch.randn(case.tokens, case.inputs).to(case.dtype)
    weights = (torch.randn(C + case.narrow, case.inputs) / case.inputs**0.5).to(case.dtype)
    taps = torch.rand(C, 4) - 0.5
    results = project_wide(program, x.cuda(), weights.cuda(), taps.cuda(), True)
    products = x.double() @ weights.double().T
    before = F.pad(products[:, :C].T, (3, 0))
    mixed = F.silu(F.conv1d(before, taps.double().unsqueeze(1), groups=C)).T
    expected = mixed, products[:, C:], products[:, :C]
    pairs = zip(results, expected, strict=True)
    return max(relative_rms(found.cpu(), exact) for found, exact in pairs if found is not None)


def slice_error(case: SliceCase) -> float:
    """Run both passes of all ranks and return the largest relative error of their results."""
    from fla.ops.quasar.cuda.scan import scan_backward as cuda_scan_bwd
    from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan
    from fla.ops.quasar.cuda.scan import slice_forward as cuda_slice
    from fla.ops.quasar.cuda.scan.slice_backward import CudaSliceGradient
    from fla.ops.quasar.operator_types import ScanInputs
    from fla.ops.quasar.parallel.context import Place, locate
    from fla.ops.quasar.parallel.exchange import unpack_maps

    T, H, S, ranks = sum(case.lengths), case.heads, case.width, list(case.ranks)
    q, k, v = (torch.randn(1, T, H, S).mul(0.3).to(case.dtype) for _ in range(3))
    beta, d_o = torch.rand(H) + 0.5, torch.randn(1, T, H, S).to(case.dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v, beta)]
    bounds = [0, *accumulate(case.lengths)]
    cu = torch.tensor(bounds)
    expected, _ = quasar_chunked(leaves[0], leaves[1], leaves[2], leaves[3], None, cu)
    exact = torch.autograd.grad(expected, leaves[:3], d_o.double())

    located = [locate(bounds, ranks, rank) for rank in range(len(ranks))]
    places = [
        Place(None, rank, tuple(local), before, after, max(ranks))
        for rank, (local, before, after, _) in enumerate(located)
    ]
    program = cuda_scan.PROGRAM.load(cuda_scan.variant_of(q.cuda()))
    gradient_program = cuda_scan_bwd.PROGRAM.load(cuda_scan_bwd.variant_of(q.cuda()))
    maps_program = cuda_slice.PROGRAM.load(cuda_slice.maps_variant(v.cuda()))
    parts = zip(*(torch.split(x.cuda(), ranks, 1) for x in (q, k, v)), strict=True)
    slices = [
        cuda_slice.CudaSlice(ScanInputs.of(*part, beta.cuda()), place, False, program, maps_program)
        for part, place in zip(parts, places, strict=True)
    ]
    all_maps = torch.stack([one.compute_map() for one in slices])
    for one in slices:
        one.run(all_maps)
    G = unpack_maps(all_maps, H, S, S).G
    passes = [
        CudaSliceGradient(one.saved(), place, part, None, gradient_program, maps_program)
        for one, place, part in zip(slices, places, torch.split(d_o.cuda(), ranks, 1), strict=True)
    ]
    offsets = torch.stack([one.compute_offset() for one in passes])
    gradients = []
    for one, place in zip(passes, places, strict=True):
        one.overlap()
        later = slice(place.rank + 1, place.rank + place.after)
        gradients.append(one.run(G[later].clone(), offsets))
    errors = [relative_rms(torch.cat([one.o.cpu() for one in slices], 1), expected)]
    for name, wanted in zip(("q", "k", "v"), exact, strict=True):
        found = torch.cat([getattr(one, name).cpu() for one in gradients], 1)
        errors.append(relative_rms(found, wanted))
    return max(errors)


def clear_outputs() -> None:
    """Fill the operator's outputs with zeros before they are written, from now on in this process.

    On Hopper o is written by bulk stores. A tool that does not track them takes reads of o for
    reads of uninitialised memory. The comparison of o shows whether all of it is written.
    """
    empty_like = torch.empty_like

    def cleared(x: torch.Tensor, **options: Any) -> torch.Tensor:
        tensor = empty_like(x, **options)
        return tensor.zero_() if x.dtype in (torch.bfloat16, torch.float16) else tensor

    torch.empty_like = cleared  # type: ignore[assignment]


CASES: Mapping[str, tuple[Callable[..., float], Sequence[NamedTuple]]] = {
    "operator": (operator_error, OPERATOR),
    "slices": (slice_error, SLICES),
    "portable": (layer_error, PORTABLE_LAYER),
    "layer": (layer_error, LAYER),
    "wide": (wide_error, WIDE),
}
"""The calls of each part, with the function that checks them."""


def wrong_cases(measure: Callable[..., float], cases: Sequence[NamedTuple]) -> list[str]:
    """Run the cases and describe those with an error beyond LIMIT, or NaN."""
    wrong, began = [], time.monotonic()
    for case in cases:
        # printed before the call, so that a tool's output follows the call's name
        print(f"{time.monotonic() - began:5.1f} s: {case}", flush=True)
        error = measure(case)
        if not error <= LIMIT:
            wrong.append(f"{case}: relative error {error:.1e}")
    print(f"{time.monotonic() - began:5.1f} s: the end", flush=True)
    return wrong


def main() -> int:
    """Run the calls, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="+", choices=(*CASES, "handshake", *TOOLS))
    parser.add_argument("--limit", type=int, default=0, help="seconds; 0 for none")
    parser.add_argument("--clear", action="store_true", help="outputs are zero before")
    args = parser.parse_args()
    if args.clear:
        clear_outputs()
    signal.alarm(args.limit)  # ends the process even while it waits in the driver
    os.environ["QUASAR_BACKEND"] = "cuda"  # a call of another implementation is an error
    os.environ["QUASAR_GRAPHS"] = "0"  # graphs need torch's memory cache, which is disabled
    mount()
    torch.manual_seed(0)
    wrong = []
    for what in args.what:
        if what in CASES:
            wrong += wrong_cases(*CASES[what])
        elif what == "handshake":
            run_control(HANDSHAKE, 0)
        else:
            run_control(PLANTED, TOOLS.index(what))  # the faults are numbered as the tools are
    torch.cuda.synchronize()
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
