"""`chunk_quasar` over the ranks of a process group: both passes, each with an exchange.

In the forward pass, each rank computes the map of its slice's last sequence and gathers the maps of
all ranks. It folds the maps of earlier ranks to the state that enters its slice, and computes its
outputs from that state. The backward pass does the same with the gradient of the state, from later
ranks to earlier ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fla.ops.quasar import torch_private
from fla.ops.quasar.backend import cuda_gradient_program, cuda_program, kernel_inputs
from fla.ops.quasar.cuda.program import LoadedProgram
from fla.ops.quasar.cuda.scan import slice_forward as cuda_slice
from fla.ops.quasar.cuda.scan.slice_forward import CudaSlice
from fla.ops.quasar.cuda.scan.slice_backward import CudaSliceGradient
from fla.ops.quasar.device import is_recorded, on_its_device, once_differentiable
from fla.ops.quasar.parallel.by_torch import TorchGradient, TorchSlice
from fla.ops.quasar.parallel.context import Place, expect_one_row, place_of
from fla.ops.quasar.parallel.exchange import gather, start_gather, unpack_maps
from fla.ops.quasar.operator_types import Gradients, Saved, ScanInputs
from fla.ops.quasar.switches import Backend, requested_backend

STOPPING_WORK = 6144 * 512
"""From this product of tokens and 64-channel panels of the longest slice on, pass 1 may stop early.

Such a call has a second exchange, which takes 0.1 ms of the GPU's time and 0.3 ms of the host's
(two H200s). All ranks must make the same decision, so it does not depend on the GPU.
"""


class SliceResults(NamedTuple):
    """Results of a slice's forward pass."""

    o: torch.Tensor  # [1, T, H, V], q's dtype
    final_state: torch.Tensor | None  # [sequences of the slice, H, K, V], if requested
    saved: Saved
    all_maps: torch.Tensor  # [ranks, ...], the packed maps of all ranks

    def later_G(self, place: Place) -> torch.Tensor:
        """Return a copy of `[after - 1, H, K, K]`, G of the ranks that the last sequence fills.

        The backward pass needs them.
        """
        (H, V), K = self.o.shape[2:], self.saved.inputs.q.shape[-1]
        G = unpack_maps(self.all_maps, H, K, V).G
        return G[place.rank + 1 : place.rank + max(1, place.after)].clone()


class ParallelChunks(torch.autograd.Function):
    """Saves the slice's inputs, its maps and states, and the maps of the ranks after it."""

    @staticmethod
    def forward(
        ctx: Any, place: Place, backend: Backend, output_final_state: bool, *inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the forward pass on `inputs`, those of `ChunkQuasarFunction.forward`."""
        x = ScanInputs.of(*inputs)
        results = slice_forward(place, x, output_final_state, backend)
        ctx.save_for_backward(*results.saved.tensors(), results.later_G(place))
        ctx.call = place, results.saved.segments, x.scale
        return results[:2]

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor, d_final: torch.Tensor | None) -> Any:
        """Return the gradients of `forward`'s arguments."""
        return _backward(ctx, do, d_final)


@once_differentiable
@on_its_device
def _backward(ctx: Any, do: torch.Tensor, d_final: torch.Tensor | None) -> Any:
    *tensors, G = ctx.saved_tensors
    place, segments, scale = ctx.call
    saved = Saved.of(tensors, segments, scale)
    with torch_private.no_autocast():
        *grads, d_initial, d_g = slice_backward(place, saved, G, do, d_final)
    if not ctx.needs_input_grad[7]:
        d_initial = None
    elif place.before:  # that state came from another rank
        d_initial[0] = 0
    return None, None, None, *grads, d_initial, None, None, d_g


def run_parallel(context: Any, output_final_state: bool, *inputs: Any) -> Any:
    """Compute `run_chunks` for this rank's slice of one row; every rank of the group must call it.

    Args:
        context: from `build_cp_context`, this package's or fla's.
        inputs: those of `ChunkQuasarFunction.forward`. The initial state of a sequence that begins
            on an earlier rank is ignored, and its gradient is zero.

    Returns:
        o `[1, T, H, V]`, and the state `[sequences, H, K, V]` after each of the slice's sequences;
        for a sequence that continues on a later rank, the state at the slice's end.

    Raises:
        ValueError: the tensors have more than one row, or the context has another number of tokens.
        RuntimeError: the exchange failed, because a rank had ended or did not arrive in time.
    """
    q, g = inputs[0], inputs[-1]
    expect_one_row(q)
    place = place_of(context, q.shape[1])
    per_channel = g is not None and g.ndim == 4  # no kernel computes slices with such decays
    backend = requested_backend() if q.is_cuda and not per_channel else "torch"
    with torch_private.no_autocast():
        if is_recorded(*inputs[:5], g):
            return ParallelChunks.apply(place, backend, output_final_state, *inputs)
        return slice_forward(place, ScanInputs.of(*inputs), output_final_state, backend)[:2]


def slice_forward(
    place: Place, inputs: ScanInputs, output_final_state: bool, backend: Backend
) -> SliceResults:
    """Run the forward pass of this rank's slice; it records nothing for autograd."""
    v = inputs.v
    rounds = 1 + (v.is_cuda and place.longest * v.shape[2] * (v.shape[3] // 64) >= STOPPING_WORK)
    scan = start_forward(place, inputs, rounds > 1, backend)
    for _ in range(rounds):
        all_maps = gather(scan.compute_map(), place.group)
        scan.run(all_maps)
    return SliceResults(scan.o, scan.final if output_final_state else None, scan.saved(), all_maps)


def slice_backward(
    place: Place, saved: Saved, G: torch.Tensor, do: torch.Tensor, d_final: torch.Tensor | None
) -> Gradients:
    """Return the gradients of this rank's inputs; `saved` and `G` are from `slice_forward`."""
    gradient = _start_backward(place, saved, do, d_final)
    finish = start_gather(gradient.compute_offset(), place.group)
    gradient.overlap()
    return gradient.run(G, finish())


def start_forward(
    place: Place, inputs: ScanInputs, may_stop: bool, backend: Backend
) -> CudaSlice | TorchSlice:
    """Return a slice's forward pass by the CUDA kernels if they support it, otherwise by torch.

    There are no Triton kernels for slices, so the backend `triton` has the effect of `auto`.
    """
    if place.before and inputs.initial_state is not None:
        initial = inputs.initial_state.clone()
        initial[0] = 0
        inputs = inputs._replace(initial_state=initial)
    inputs = inputs._replace(cu_seqlens=None)
    if inputs.q.is_cuda and backend != "torch" and inputs.q.dtype != torch.float64:
        prepared = kernel_inputs(inputs)
        program = cuda_program(prepared, "auto" if backend == "triton" else backend)
        maps_program = program and _find_maps_program(prepared.v)
        if program is not None and maps_program is not None:
            return CudaSlice(prepared, place, may_stop, program, maps_program)
    return TorchSlice(inputs, place)


def _start_backward(
    place: Place, saved: Saved, do: torch.Tensor, d_final: torch.Tensor | None
) -> CudaSliceGradient | TorchGradient:
    """Return the backward pass of a slice, by the kernels if its forward pass used them."""
    program = saved.segments and cuda_gradient_program(saved.inputs)
    maps_program = program and _find_maps_program(saved.inputs.v)
    if program is None or maps_program is None:
        return TorchGradient(saved, place, do, d_final)
    do = do.to(saved.inputs.q.dtype).contiguous()
    d_final = None if d_final is None else d_final.float().contiguous()
    return CudaSliceGradient(saved, place, do, d_final, program, maps_program)


def _find_maps_program(v: torch.Tensor) -> LoadedProgram | None:
    return cuda_slice.PROGRAM.find_loaded(cuda_slice.maps_variant(v))


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
