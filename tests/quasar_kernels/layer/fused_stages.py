"""The fused stages as their tests call them: inputs, both kernels, and the same in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fla.ops.quasar.layer.hopper.program import swizzle_weights
from fla.ops.quasar.layer.hopper.projection import taps_buffer, taps_layout

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.tolerances import PROJECTION

EPS = 1e-5


def projection_weights(device="cpu"):
    """Those of q, k, v and the narrow gate, and three convolutions'."""
    wide = [torch.randn(512, 512, device=device) / 512**0.5 for _ in range(3)]
    narrow = torch.randn(64, 512, device=device) / 512**0.5
    taps = [torch.rand(512, 1, 4, device=device) - 0.5 for _ in range(3)]
    return wide, narrow, taps


def project(kernels, program, x, wide, narrow, taps, dtype):
    """The first stage: q, k and v in one tensor, and the narrow gate."""
    joined = taps_buffer(x)
    layouts = kernels.projection_layouts(*wide, narrow)
    tiles = swizzle_weights(program, layouts, dtype, taps_layout(tuple(taps), joined))
    return kernels.project(program, x, tiles[0], joined, dtype)


def exact_projection(x, wide, narrow, taps, dtype):
    """The same in float64, of x and weights rounded as the kernel takes them."""
    x = x.to(dtype).double()
    products = F.pad((x @ torch.cat(wide).to(dtype).double().T).T.unsqueeze(0), (3, 0))
    mixed = F.conv1d(products, torch.cat(taps).double(), groups=1536)
    return F.silu(mixed)[0].T, x @ narrow.to(dtype).double().T


def check_projection(found, wanted, dtype):
    """Both results are near float64's, in every row: those at the joints of tiles and runs too."""
    for result, exact in zip(found, wanted, strict=True):
        assert result.dtype == dtype
        assert torch.isfinite(result).all()
        assert relative_rms(result, exact) <= PROJECTION[dtype]
        wrong = (result.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert wrong.max() <= 3 * PROJECTION[dtype]


def output_inputs(R, dtype, outputs=512, device="cpu"):
    """o with heads of different scales, narrow, and weights as a layer holds them."""
    o = torch.randn(R, 8, 64, device=device) * (0.05 + torch.rand(R, 8, 1, device=device))
    narrow = torch.randn(R, 64, device=device)
    gate = (torch.rand(512, 64, device=device) - 0.5) / 2
    bias = (torch.rand(512, device=device) - 0.5) * 2
    norm = 1 + 0.3 * torch.randn(64, device=device)
    out = (torch.rand(outputs, 512, device=device) - 0.5) * 2 / 512**0.5
    return o.to(dtype), narrow.to(dtype), gate, bias, norm, out


def gated_output(kernels, program, o, narrow, gate, bias, norm, out):
    """The last stage: the gated norm, and the output's product."""
    tiles = swizzle_weights(program, kernels.output_layouts(gate, norm, out), o.dtype)
    return kernels.gated_output(program, o, narrow, tiles[0], bias, tiles[1], EPS)


def exact_output(*inputs):
    """The same in float64."""
    o, narrow, gate, bias, norm, out = (x.double() for x in inputs)
    scale = (o.square().mean(-1, keepdim=True) + EPS).rsqrt()
    gates = torch.sigmoid(F.linear(narrow, gate, bias)).view_as(o)
    return F.linear((o * scale * norm * gates).flatten(1), out)


def apart(narrow):
    """The same values in rows that are apart, with NaN between them."""
    R, S = narrow.shape
    wide = torch.full((R, 3 * S), float("nan"), dtype=narrow.dtype, device=narrow.device)
    wide[:, S : 2 * S] = narrow
    return wide[:, S : 2 * S]
