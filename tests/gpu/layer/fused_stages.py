"""Tests on a GPU that both implementations of the fused stages share, as classes to inherit."""

from __future__ import annotations

import pytest
import torch
from fla.ops.quasar.cuda.program import Variant

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.layer import fused_stages as stages
from tests.quasar_kernels.tolerances import GATED_OUTPUT, PROJECTION

BF16 = torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", [BF16, torch.float16])
lengths = pytest.mark.parametrize(
    "T", [1, 3, 4, 63, 64, 65, 127, 128, 129, 512, 1000, 2048, 4099, 16_387, 33_793, 100_000]
)


def noise(T):
    return torch.randn(T, 512, device="cuda")


def weights():
    return stages.projection_weights("cuda")


def output_inputs(R, dtype=BF16, outputs=512):
    return stages.output_inputs(R, dtype, outputs, "cuda")


class Projection:
    """Tests of the fused projection; a subclass has the attribute `kernels`, a module."""

    options: tuple[str, ...] = ()  # of NVRTC

    def project(self, x, wide, narrow, taps, dtype=BF16):
        program = self.kernels.PROGRAM.load(Variant(x.device.index, dtype, self.options))
        return stages.project(self.kernels, program, x, wide, narrow, taps, dtype)

    @lengths
    @dtypes
    def test_the_projection_matches_float64(self, T, dtype):
        x, parts = noise(T), weights()
        wanted = stages.exact_projection(x, *parts, dtype)
        stages.check_projection(self.project(x, *parts, dtype), wanted, dtype)

    def test_a_token_affects_itself_and_the_next_three(self):
        changed, x, parts = 20_001, noise(40_000), weights()
        before = self.project(x, *parts)
        x[changed] += 1
        after = self.project(x, *parts)
        rows = (before[0] != after[0]).any(1).nonzero().flatten()
        assert rows.tolist() == list(range(changed, changed + 4))
        assert (before[1] != after[1]).any(1).nonzero().flatten().tolist() == [changed]

    def test_repeated_projections_are_equal(self):
        x, parts = noise(70_000), weights()
        first = self.project(x, *parts)
        for _ in range(3):
            assert all(map(torch.equal, self.project(x, *parts), first))

    def test_more_than_2_31_elements(self):
        x, parts = noise(1_500_000), weights()
        found = self.project(x, *parts)
        expected = stages.exact_projection(x[-2003:], *parts, BF16)
        for result, wanted in zip(found, expected, strict=True):
            assert relative_rms(result[-2000:], wanted[-2000:]) <= PROJECTION[BF16]

    @pytest.mark.parametrize("factor", [1, 1e6])  # the latter exceeds the range of fp16
    @dtypes
    def test_results_out_of_range_are_finite(self, factor, dtype):
        wide, narrow, taps = weights()
        large, taps = [1e6 * w for w in wide], [factor * t for t in taps]
        found, _ = self.project(noise(500), large, narrow, taps, dtype)
        assert torch.isfinite(found).all()


class GatedOutput:
    """Tests of the fused output; a subclass has the attribute `kernels`, a module."""

    options: tuple[str, ...] = ()  # of NVRTC

    def output(self, o, *rest):
        program = self.kernels.PROGRAM.load(Variant(o.device.index, o.dtype, self.options))
        return stages.gated_output(self.kernels, program, o, *rest)

    @lengths
    @dtypes
    def test_the_output_matches_float64(self, T, dtype):
        inputs = output_inputs(T, dtype)
        y, expected = self.output(*inputs), stages.exact_output(*inputs)
        assert torch.isfinite(y).all()
        assert relative_rms(y, expected) <= GATED_OUTPUT[dtype]
        for part, wanted in zip(y.tensor_split(8), expected.tensor_split(8), strict=True):
            assert not len(part) or relative_rms(part, wanted) <= GATED_OUTPUT[dtype] * 1.5

    @pytest.mark.parametrize("outputs", [128, 256, 384, 1024])
    def test_every_width_of_the_output(self, outputs):
        inputs = output_inputs(777, outputs=outputs)
        y = self.output(*inputs)
        assert y.shape == (777, outputs)
        assert relative_rms(y, stages.exact_output(*inputs)) <= GATED_OUTPUT[BF16]

    def test_a_strided_gate_input(self):
        o, narrow, *rest = output_inputs(300)
        assert torch.equal(
            self.output(o, stages.apart(narrow), *rest), self.output(o, narrow, *rest)
        )

    def test_tokens_are_independent(self):
        o, narrow, *rest = output_inputs(5000)
        before = self.output(o, narrow, *rest)
        o[2500], narrow[2500] = float("nan"), float("nan")
        after = self.output(o, narrow, *rest)
        others = torch.arange(5000, device="cuda") != 2500
        assert after[2500].isnan().all()
        assert torch.equal(after[others], before[others])

    def test_zero_and_small_heads_and_large_gates(self):
        o, narrow, gate, *rest = output_inputs(200)
        o[:, 3] = 0
        o[:, 5] *= 1e-3
        inputs = (o, narrow, (gate * 8).bfloat16(), *rest)
        assert (
            relative_rms(self.output(*inputs), stages.exact_output(*inputs)) <= GATED_OUTPUT[BF16]
        )

    def test_repeated_outputs_are_equal(self):
        inputs = output_inputs(70_000)
        first = self.output(*inputs)
        assert all(torch.equal(self.output(*inputs), first) for _ in range(5))
