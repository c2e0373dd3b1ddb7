"""Slices of one row by the CUDA kernels, emulated on a CPU, rank after rank."""

from itertools import accumulate, pairwise

import pytest
import torch
from fla.ops.quasar.cuda.scan import scan_backward, scan_forward
from fla.ops.quasar.cuda.scan import slice_forward as slice_module
from fla.ops.quasar.cuda.scan.slice_backward import CudaSliceGradient
from fla.ops.quasar.cuda.scan.slice_forward import CudaSlice
from fla.ops.quasar.parallel.by_torch import TorchSlice
from fla.ops.quasar.parallel.context import Place, locate
from fla.ops.quasar.parallel.exchange import unpack_maps

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.cuda.emulated.programs import EMULATED
from tests.quasar_kernels.cuda.scan.calls import OWN, READ, draw, exact
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import BETA_GRADIENT, GRADIENT, OPERATOR

pytestmark = EMULATED

SCALE = 0.5


def places(bounds, lengths):
    """Return the place of every rank."""
    located = [locate(bounds, lengths, rank) for rank in range(len(lengths))]
    return [
        Place(None, rank, tuple(local), before, after, max(lengths))
        for rank, (local, before, after, _) in enumerate(located)
    ]


def parts(x, lengths):
    """Return the inputs of every rank, without initial states."""
    inputs = []
    for begin, end in pairwise([0, *accumulate(lengths)]):
        tensors = {
            name: y[:, begin:end] if y.ndim > 1 else y
            for name, y in x.leaves().items()
            if name != "initial_state"
        }
        inputs.append(x._replace(**tensors, initial_state=None, bounds=None).inputs(SCALE))
    return inputs


def load_maps(programs, x, late=False):
    """Return the program of the kernels around the exchange."""
    return programs.load(slice_module.PROGRAM, x.v.dtype, slice_module.maps_variant(x.v)[2], late)


def run_forward(x, lengths, where, *loaded, rounds=1):
    """Return the finished slices of all ranks, and their maps."""
    slices = [
        CudaSlice(inputs, place, rounds > 1, *loaded)
        for inputs, place in zip(parts(x, lengths), where, strict=True)
    ]
    for _ in range(rounds):
        all_maps = torch.stack([each.compute_map() for each in slices])
        for each in slices:
            each.run(all_maps)
    return slices, unpack_maps(all_maps, x.v.shape[2], x.k.shape[3], x.v.shape[3])


def run_backward(slices, maps, lengths, where, d_o, *loaded):
    """Return the gradients of all ranks."""
    edges = [*pairwise([0, *accumulate(lengths)])]
    passes = [
        CudaSliceGradient(each.saved(), place, d_o[:, begin:end].contiguous(), None, *loaded)
        for each, place, (begin, end) in zip(slices, where, edges, strict=True)
    ]
    offsets = torch.stack([each.compute_offset() for each in passes])
    gradients = []
    for each, (_, rank, _, _, after, _) in zip(passes, where, strict=True):
        each.overlap()
        gradients.append(each.run(maps.G[rank + 1 : rank + after].clone(), offsets))
    return gradients


@pytest.mark.parametrize(
    ("kind", "bounds", "lengths", "group"),
    [
        (OWN, [0, 640], [320, 320], 1),
        (OWN, [0, 130, 800, 850, 1100], [300, 70, 330, 400], 1),
        (READ, [0, 630], [330, 300], 2),  # heads share keys where step sizes are read
        (0.02, [0, 400, 630], [330, 300], 1),
    ],
)
def test_slices_match_float64(programs, kind, bounds, lengths, group):
    x = draw(kind, sum(lengths), group=group)
    x = x._replace(bounds=packed([b - a for a, b in pairwise(bounds)]), initial_state=None)
    where = places(bounds, lengths)
    leaves = {name: y.double().requires_grad_() for name, y in x.leaves().items()}
    o, final = exact(x._replace(**leaves), SCALE)
    d_o = torch.randn_like(x.v)
    expected = {"o": o, "final": final[-1]}
    expected |= zip(leaves, torch.autograd.grad(o, [*leaves.values()], d_o.double()), strict=True)
    results = []
    for late in (False, True):
        maps_program = load_maps(programs, x, late)
        program = x.load(programs, scan_forward.PROGRAM, late)
        slices, maps = run_forward(x, lengths, where, program, maps_program)
        program = x.load(programs, scan_backward.PROGRAM, late)
        gradients = run_backward(slices, maps, lengths, where, d_o, program, maps_program)
        results.append({"o": torch.cat([each.o for each in slices], 1)})
        results[-1]["final"] = slices[-1].final[-1]
        for name in leaves:
            parts_of = [getattr(each, name) for each in gradients]
            is_sum = name == "beta" and kind == OWN
            results[-1][name] = sum(parts_of) if is_sum else torch.cat(parts_of, 1)
    limits = {"o": OPERATOR, "final": OPERATOR}
    for name, exact_result in expected.items():
        assert torch.equal(results[0][name], results[1][name]), name
        limit = limits.get(name, GRADIENT)[torch.bfloat16]
        if name == "beta" and kind == OWN:
            limit = BETA_GRADIENT
        assert relative_rms(results[0][name], exact_result) <= limit, name


def test_the_outputs_of_wide_heads_match_float64(programs):
    lengths = [512, 384, 204]
    x = draw(OWN, sum(lengths), width=128)._replace(initial_state=None)
    loaded = x.load(programs, scan_forward.PROGRAM), load_maps(programs, x)
    slices, _ = run_forward(x, lengths, places([0, sum(lengths)], lengths), *loaded)
    o, final = exact(x, SCALE)
    limit = OPERATOR[torch.bfloat16]
    for each, exact_o in zip(slices, o.split(lengths, 1), strict=True):
        assert relative_rms(each.o, exact_o) <= limit
    assert relative_rms(slices[-1].final[-1], final[-1]) <= limit


def test_a_rank_without_kernels_gives_others_the_same_map_in_the_second_round():
    lengths = [40, 40, 40]
    x = draw(OWN, sum(lengths))
    where = places([0, sum(lengths)], lengths)
    slices = [TorchSlice(*each) for each in zip(parts(x, lengths), where, strict=True)]
    maps = torch.stack([each.compute_map() for each in slices])
    for each in slices:
        each.run(maps)
    assert torch.equal(torch.stack([each.compute_map() for each in slices]), maps)


def test_a_second_exchange_corrects_states_that_pass_1_neglected(programs, monkeypatch):
    lengths = [2048, 1024, 1024]
    x = draw(OWN, sum(lengths))
    # each key erases four fifths of the state in its direction, and the directions alternate, so
    # that pass 1 stops 512 tokens before a segment's end, after the burst
    k = 1.265 * torch.eye(64).repeat(sum(lengths) // 64, 1).unsqueeze(1).repeat(1, 2, 1)
    x = x._replace(k=k.bfloat16().unsqueeze(0), beta=torch.ones(2), initial_state=None)
    x.v[:, 2048 - 560 : 2048 - 550, 1] *= 30_000
    where = places([0, sum(lengths)], lengths)
    monkeypatch.setattr(slice_module, "LONG", 512)
    monkeypatch.setattr(scan_forward, "_cut", lambda *_: (2, 1024))
    o, _ = exact(x, SCALE)
    loaded = x.load(programs, scan_forward.PROGRAM), load_maps(programs, x)
    once, _ = run_forward(x, lengths, where, *loaded)
    twice, maps = run_forward(x, lengths, where, *loaded, rounds=2)
    assert maps.marked.tolist()[0] == [0, 1]
    for slices in (once, twice):  # without and with early stops
        for each, exact_o in zip(slices, o.split(lengths, 1), strict=True):
            window = exact_o[:, :128]
            assert relative_rms(each.o[:, :128], window) <= 2 * OPERATOR[torch.bfloat16]
            assert relative_rms(each.o, exact_o) <= 2 * OPERATOR[torch.bfloat16]
