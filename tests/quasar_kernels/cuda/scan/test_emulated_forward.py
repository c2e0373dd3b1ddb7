"""The CUDA kernels of the forward pass, emulated on a CPU: maps, states and outputs."""

import ctypes

import pytest
import torch
from fla.ops.quasar import checkpoints
from fla.ops.quasar.cuda.scan import scan_forward as cuda_scan

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.cuda.emulated.programs import EMULATED
from tests.quasar_kernels.cuda.scan.calls import OWN, READ, Maps, cut_by, draw, exact, exact_maps
from tests.quasar_kernels.tolerances import MAP, OPERATOR

pytestmark = EMULATED

BF16, FP16 = torch.bfloat16, torch.float16
dtypes = pytest.mark.parametrize("dtype", MAP)
widths = pytest.mark.parametrize("width", [64, 128])


def run_maps(program, x, segments):
    """Launch only pass 1 and the scan, on one sequence from a state of zero."""
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
    program.kernels["segment_map"].launch((segments * H * (S // 64), 1), parameters)
    R = states.clone()
    program.kernels["segment_scan"].launch((H, S // 8), parameters)
    return Maps(G, R, states)


def compute_maps(programs, x, segments):
    """Return the kernels' maps and the float64 ones."""
    x = x._replace(initial_state=None)
    maps = run_maps(x.load(programs, cuda_scan.PROGRAM), x, segments)
    return maps, exact_maps(x, cut_by(x, x.k.shape[1] // segments))


def largest_error(maps, expected):
    """Return the largest error of a segment and head; the last segment has no map."""
    pairs = zip(maps[:-1].flatten(0, 1), expected[:-1].flatten(0, 1), strict=True)
    return max(relative_rms(x, y) for x, y in pairs)


@dtypes
@widths
def test_maps_and_states_match_float64(programs, dtype, width):
    x = draw(OWN, 3 * 192, width=width, dtype=dtype)
    maps, expected = compute_maps(programs, x, 3)
    assert largest_error(maps.G, expected.G) <= 1e-3
    assert largest_error(maps.R, expected.R) <= MAP[dtype]
    assert largest_error(maps.states, expected.states) <= MAP[dtype]


@dtypes
def test_a_burst_leaves_no_error_after_the_segment_in_which_it_decays(programs, dtype):
    x = draw(OWN, 4 * 1024, dtype=dtype)
    x.v[:, 1000:1010] *= 30_000
    # the state decays within 1,000 tokens
    x = x._replace(k=torch.randn_like(x.k) * 0.15, beta=torch.ones_like(x.beta))
    maps, expected = compute_maps(programs, x, 4)
    assert expected.states[0].abs().max() >= 1000 * expected.states[1].abs().max()
    assert largest_error(maps.states, expected.states) <= MAP[BF16]


@dtypes
def test_channels_that_decay_slowly_do_not_increase_the_error(programs, dtype):
    x = draw(OWN, 2 * 2048, dtype=dtype)
    x.k[..., ::5] *= 0.05
    x.v[:, 100:110] *= 30_000
    maps, expected = compute_maps(programs, x, 2)
    # the slow channels' rows stay near those of the identity, the others have decayed
    diagonal = expected.G[0].diagonal(dim1=-2, dim2=-1)
    assert (diagonal.amax(-1) > 0.5).all()
    assert (diagonal.amin(-1) < 1e-2).all()
    assert largest_error(maps.R, expected.R) <= MAP[dtype]
    assert largest_error(maps.states, expected.states) <= MAP[dtype]


def assert_outputs(programs, x, segments=None):
    """Compare output and final state with float64; they must not depend on when copies arrive."""
    scan, late_scan = (
        cuda_scan.forward(
            x.inputs(0.5),
            True,
            segments=segments,
            program=x.load(programs, cuda_scan.PROGRAM, late),
        )
        for late in (False, True)
    )
    cut = scan.saved.segments
    assert cut.total > cut.sequences
    for y, late, expected in zip(scan[:2], late_scan[:2], exact(x, 0.5), strict=True):
        assert torch.equal(y, late)
        assert relative_rms(y, expected) <= OPERATOR[x.q.dtype]
    return scan.saved


@pytest.mark.parametrize(
    ("kind", "dtype"), [(OWN, BF16), (OWN, FP16), (READ, BF16), (0.02, BF16), (30.0, BF16)]
)
@widths
def test_outputs_and_the_final_state(programs, kind, dtype, width):
    x = draw(kind, 280, B=128 // width, width=width, dtype=dtype)  # ends within a chunk
    assert assert_outputs(programs, x, 3).segments.length == 128


@pytest.mark.parametrize("kind", [OWN, READ, 0.02])
def test_outputs_of_packed_sequences(programs, kind):
    saved = assert_outputs(programs, draw(kind, [150, 0, 5, 64, 131]))
    assert saved.segments.longest == 128


@pytest.mark.parametrize("kind", [READ, 0.02])
def test_outputs_of_heads_that_share_keys(programs, kind):
    assert_outputs(programs, draw(kind, 280, group=3), 3)


@pytest.mark.parametrize("burst", [1, 1e6])
def test_segments_in_which_pass_1_stops_early(programs, monkeypatch, burst):
    x = draw(0.04, 2 * 640)
    x.v[:, 100:110] *= burst
    monkeypatch.setattr(cuda_scan, "LONG", 2 * 640)  # with decays, half is enough
    G = assert_outputs(programs, x, 2).G[0]
    # too much of a burst would remain, so the whole map is computed again
    assert (G == 0).all() if burst == 1 else (G != 0).all()


@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("kind", [OWN, READ, 0.02])
def test_nan_stays_in_each_later_output(programs, kind, place):
    x = draw(kind, 280)
    getattr(x, place)[:, 70, 1, 5] = torch.nan
    scan = cuda_scan.forward(
        x.inputs(0.5), True, segments=3, program=x.load(programs, cuda_scan.PROGRAM)
    )
    assert scan.o[:, :64].isfinite().all()
    assert scan.o[:, :, 0].isfinite().all()
    finite = scan.o[0, 70:, 1].isfinite().all(-1)
    assert not finite.any(), finite.nonzero()
    assert not scan.final_state[0, 1].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "tokens", "B", "every", "length"),
    [
        (OWN, 400, 2, 128, 128),
        (0.02, 512, 1, 256, 128),  # two segments for each checkpoint
        (READ, [1, 256, 0, 300, 128], 1, 128, 128),
        (READ, [130, 512], 1, 256, 256),
    ],
)
def test_states_after_every_n_tokens(programs, monkeypatch, kind, tokens, B, every, length):
    x = draw(kind, tokens, B=B)
    monkeypatch.setattr(cuda_scan, "cut_evenly", lambda *_: (0, length))
    monkeypatch.setattr(cuda_scan, "stay_whole", lambda *_: False)
    program = x.load(programs, cuda_scan.PROGRAM)

    def scan(inputs, final, *, backend, every):
        assert backend == "auto"
        return cuda_scan.forward(inputs, final, every=every, program=program)

    monkeypatch.setattr(checkpoints, "has_kernels", lambda _: True)
    monkeypatch.setattr(checkpoints, "scan_forward", scan)
    arguments = *x[:4], x.initial_state, x.bounds, 0.5, x.g
    o, final, found = checkpoints.run_with_checkpoints(every, *arguments)
    sizes = [tokens] * B if x.bounds is None else tokens
    whole = [n + every <= size for size in sizes for n in range(0, max(size, 1), every)]
    expected = exact_maps(x, cut_by(x, every)).states[torch.tensor(whole)]
    assert found.shape[:2] == (B, len(expected) // B)
    for y, wanted in zip(found.flatten(0, 1), expected, strict=True):
        assert relative_rms(y, wanted) <= OPERATOR[BF16]
    for y, wanted in zip((o, final), exact(x, 0.5), strict=True):
        assert relative_rms(y, wanted) <= OPERATOR[BF16]
