"""Pass 1 and the scan of the CUDA kernels, run on a CPU from their own sources."""

from __future__ import annotations

import shutil

import pytest
import torch
from fla.ops.quasar.cuda.scan import forward as cuda_scan

from quasar_kernels.delta_reference import delta_chunked
from quasar_kernels.reference import quasar_chunked, relative_rms
from tests.quasar_kernels.cuda.scan import emulated_kernels
from tests.quasar_kernels.delta_rule.calls import inputs
from tests.quasar_kernels.inputs import layer_like
from tests.quasar_kernels.tolerances import MAP

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

dtypes = pytest.mark.parametrize("dtype", MAP)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Give the program for a head width, built once."""
    folder, built = tmp_path_factory.mktemp("emulated"), {}

    def get(width, steps=()):
        if (width, steps) not in built:
            built[width, steps] = emulated_kernels.build(folder, width, steps)
        return built[width, steps]

    return get


def run(program, folder, k, v, beta, segments):
    """The maps of k, v `[1, T, H, S]`, and what they are in float64."""
    T, S = k.shape[1], k.shape[3]
    length = T // segments
    found = emulated_kernels.run(program(S), folder, k[0], v[0], beta, segments, length)
    eye = torch.eye(S, dtype=torch.float64).expand(1, k.shape[2], S, S)
    G, R, states, state = [], [], [], torch.zeros_like(eye)
    for keys, values in zip(k.split(length, 1), v.split(length, 1), strict=True):
        R.append(quasar_chunked(keys, keys, values, beta)[1])
        G.append(quasar_chunked(keys, keys, torch.zeros_like(values), beta, eye)[1])
        state = G[-1] @ state + R[-1]
        states.append(state)
    return found, emulated_kernels.Maps(*(torch.cat(x) for x in (G, R, states)))


def worst(found, expected):
    """The largest error of a segment and head; the last segment has no map."""
    pairs = zip(found[:-1].flatten(0, 1), expected[:-1].flatten(0, 1), strict=True)
    return max(relative_rms(x, wanted) for x, wanted in pairs)


@dtypes
@pytest.mark.parametrize("width", [64, 128])
def test_maps_and_states_are_float64_s(dtype, width, program, tmp_path):
    _, k, v, beta = layer_like(3 * 192, H=2, S=width, dtype=dtype)
    found, expected = run(program, tmp_path, k, v, beta, 3)
    assert worst(found.G, expected.G) <= 1e-3
    assert worst(found.R, expected.R) <= MAP[dtype]
    assert worst(found.states, expected.states) <= MAP[dtype]


@dtypes
def test_a_burst_is_gone_behind_the_segment_that_forgets_it(dtype, program, tmp_path):
    _, k, v, beta = layer_like(4 * 1024, H=2, S=64, dtype=dtype)
    k, beta = torch.randn_like(k) * 0.15, torch.ones_like(beta)  # forgets within 1,000 tokens
    v[:, 1000:1010] *= 30_000
    found, expected = run(program, tmp_path, k, v, beta, 4)
    assert expected.states[0].abs().max() >= 1000 * expected.states[1].abs().max()
    assert worst(found.states, expected.states) <= MAP[torch.bfloat16]


@dtypes
def test_channels_that_forget_slowly_cost_the_others_no_digits(dtype, program, tmp_path):
    _, k, v, beta = layer_like(2 * 2048, H=2, S=64, dtype=dtype)
    k[..., ::5] *= 0.05
    v[:, 100:110] *= 30_000
    found, expected = run(program, tmp_path, k, v, beta, 2)
    # the slow channels' rows stay near those of the identity, the others' have decayed
    diagonal = expected.G[0].diagonal(dim1=-2, dim2=-1)
    assert (diagonal.amax(-1) > 0.5).all()
    assert (diagonal.amin(-1) < 1e-2).all()
    assert worst(found.R, expected.R) <= MAP[dtype]
    assert worst(found.states, expected.states) <= MAP[dtype]


@pytest.mark.parametrize("decay", [None, 0.0, 0.02, 1.0, 40.0])
@pytest.mark.parametrize("width", [64, 128])
def test_maps_of_given_step_sizes_and_decays(decay, width, program, tmp_path):
    segments, length, dtype = 3, 192, torch.bfloat16
    x = inputs(segments * length, K=width, dtype=dtype, decay=decay or 0.0)
    g = None if decay is None else x.g
    x.beta[:, ::5] = 0
    found = emulated_kernels.run(
        program(width, cuda_scan.step_options(x.beta, g)), tmp_path, x.k[0], x.v[0],
        cuda_scan.given_steps(x.beta, g), segments, length,
    )  # fmt: skip
    eye = torch.eye(width, dtype=torch.float64).expand(1, 2, width, width)
    state = torch.zeros_like(eye)
    for n in range(segments - 1):
        part = type(x)(*(y[:, n * length : (n + 1) * length] for y in x))
        q, k, v, beta, log = part
        R = delta_chunked(q, k, v, beta, log)[1]
        G = delta_chunked(q, k, torch.zeros_like(v), beta, log, eye)[1]
        state = G @ state + R
        if G.abs().max() > 1e-30:  # else it is zero in fp32
            assert relative_rms(found.G[n : n + 1], G) <= 2e-3
        assert relative_rms(found.R[n : n + 1], R) <= MAP[dtype]
        assert relative_rms(found.states[n : n + 1], state) <= MAP[dtype]
