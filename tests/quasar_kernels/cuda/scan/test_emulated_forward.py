"""The forward pass in CUDA C++, run on a CPU from its own sources: maps, states and outputs."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from fla.ops.quasar.cuda.scan import forward as cuda_scan

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.cuda.scan.calls import OWN, READ, Maps, cut_by, draw, exact, exact_maps
from tests.quasar_kernels.tolerances import MAP, OPERATOR

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.usefixtures("emulated"),
]

BF16, FP16 = torch.bfloat16, torch.float16
dtypes = pytest.mark.parametrize("dtype", MAP)
widths = pytest.mark.parametrize("width", [64, 128])


def run_maps(program, x, segments):
    """Launch pass 1 and the scan alone, on one sequence from a state of zero."""
    T, H, S = x.v.shape[1:]
    G, states = (torch.full((segments, H, S, S), float("nan")) for _ in range(2))
    at = cuda_scan.Arguments(
        k=x.k.data_ptr(),
        v=x.v.data_ptr(),
        beta=x.beta.data_ptr(),
        maps=G.data_ptr(),
        decay=None if x.g is None else x.g.data_ptr(),
        states=states.data_ptr(),
        T=T,
        length=T // segments,
        per_sequence=segments,
        heads=H,
        group=1,
    )
    at.k_stride[:], at.v_stride[:] = x.k.stride()[:3], x.v.stride()[:3]
    parameters = (ctypes.c_void_p * 2)(ctypes.addressof(at), None)
    program.kernels["segment_map"].launch((segments * H * (S // 64), 1), parameters, 0)
    R = states.clone()
    program.kernels["segment_scan"].launch((H, S // 8), parameters, 0)
    return Maps(G, R, states)


def compared_maps(programs, x, segments):
    x = x._replace(initial_state=None)
    found = run_maps(x.load(programs, cuda_scan.PROGRAM), x, segments)
    return found, exact_maps(x, cut_by(x, x.k.shape[1] // segments))


def worst(found, expected):
    """The largest error of a segment and head; the last segment has no map."""
    pairs = zip(found[:-1].flatten(0, 1), expected[:-1].flatten(0, 1), strict=True)
    return max(relative_rms(x, wanted) for x, wanted in pairs)


@dtypes
@widths
def test_maps_and_states_are_float64_s(programs, dtype, width):
    x = draw(OWN, 3 * 192, width=width, dtype=dtype)
    found, expected = compared_maps(programs, x, 3)
    assert worst(found.G, expected.G) <= 1e-3
    assert worst(found.R, expected.R) <= MAP[dtype]
    assert worst(found.states, expected.states) <= MAP[dtype]


@dtypes
def test_a_burst_is_gone_behind_the_segment_that_forgets_it(programs, dtype):
    x = draw(OWN, 4 * 1024, dtype=dtype)
    x.v[:, 1000:1010] *= 30_000
    # forgets within 1,000 tokens
    x = x._replace(k=torch.randn_like(x.k) * 0.15, beta=torch.ones_like(x.beta))
    found, expected = compared_maps(programs, x, 4)
    assert expected.states[0].abs().max() >= 1000 * expected.states[1].abs().max()
    assert worst(found.states, expected.states) <= MAP[BF16]


@dtypes
def test_channels_that_forget_slowly_cost_the_others_no_digits(programs, dtype):
    x = draw(OWN, 2 * 2048, dtype=dtype)
    x.k[..., ::5] *= 0.05
    x.v[:, 100:110] *= 30_000
    found, expected = compared_maps(programs, x, 2)
    # the slow channels' rows stay near those of the identity, the others' have decayed
    diagonal = expected.G[0].diagonal(dim1=-2, dim2=-1)
    assert (diagonal.amax(-1) > 0.5).all()
    assert (diagonal.amin(-1) < 1e-2).all()
    assert worst(found.R, expected.R) <= MAP[dtype]
    assert worst(found.states, expected.states) <= MAP[dtype]


@pytest.mark.parametrize("kind", [READ, 0.0, 0.02, 1.0, 40.0])
@widths
def test_maps_of_given_step_sizes_and_decays(programs, kind, width):
    found, expected = compared_maps(programs, draw(kind, 3 * 192, width=width), 3)
    for n in range(2):
        if expected.G[n].abs().max() > 1e-30:  # else it is zero in fp32
            assert relative_rms(found.G[n], expected.G[n]) <= 2e-3
        assert relative_rms(found.R[n], expected.R[n]) <= MAP[BF16]
        assert relative_rms(found.states[n], expected.states[n]) <= MAP[BF16]


def run(programs, x, scale=1.0, late=False, segments=None):
    """Launch the whole forward pass, as on a GPU."""
    program = x.load(programs, cuda_scan.PROGRAM, late)
    return cuda_scan.forward(x.inputs(scale), True, segments=segments, program=program)


def assert_outputs(programs, x, segments=None):
    """Output and final state are near float64's, and the same however copies arrive."""
    found, late = (run(programs, x, 0.5, late, segments) for late in (False, True))
    segments = found.saved.segments
    assert segments.total > segments.sequences
    for y, same, wanted in zip(found[:2], late[:2], exact(x, 0.5), strict=True):
        assert torch.equal(y, same)
        assert relative_rms(y, wanted) <= OPERATOR[x.q.dtype]
    return found.saved


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(OWN, BF16), (OWN, FP16), (READ, BF16), (0.02, BF16), (30.0, BF16)],
)
@widths
def test_outputs_and_the_final_state(programs, kind, dtype, width):
    x = draw(kind, 280, B=128 // width, width=width, dtype=dtype)  # ends within a chunk
    assert assert_outputs(programs, x, 3).segments.length == 128


@pytest.mark.parametrize("kind", [OWN, READ, 0.02])
def test_outputs_of_packed_sequences(programs, kind):
    found = assert_outputs(programs, draw(kind, [150, 0, 5, 64, 131]))
    assert found.segments.longest == 128


@pytest.mark.parametrize("kind", [READ, 0.02])
def test_outputs_of_heads_that_share_keys(programs, kind):
    assert_outputs(programs, draw(kind, 280, B=2, group=3), 3)


@pytest.mark.parametrize("burst", [1, 1e6])
def test_segments_that_pass_1_leaves_early(programs, monkeypatch, burst):
    x = draw(0.04, 2 * 640)
    x.v[:, 100:110] *= burst
    monkeypatch.setattr(cuda_scan, "LONG", 640)
    G = assert_outputs(programs, x, 2).G[0]
    # of a burst too much would be left, so the map is computed again, as a whole
    assert (G == 0).all() if burst == 1 else (G != 0).all()
