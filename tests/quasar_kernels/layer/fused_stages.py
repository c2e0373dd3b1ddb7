"""Calls of the fused stages for tests: inputs, both kernels, and their float64 results."""

import torch
import torch.nn.functional as F
from fla.ops.quasar.layer.weight_tiles import (
    launch_pack,
    output_layouts,
    projection_layouts,
    serialize,
    taps_layout,
)

from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.tolerances import PROJECTION

EPS = 1e-5


def taps_buffer(weight):
    """Return memory for a projection's taps."""
    return weight.new_empty(4, 1536, dtype=torch.float32)


def pack_weights(program, layouts, dtype, vectors=()):
    """Return the weight tiles of each layout, converted in one launch with the vectors."""
    sizes = [layout.weight.numel() for layout in layouts]
    memory = layouts[0].weight.new_empty(sum(sizes), dtype=dtype)
    launch_pack(program, serialize(layouts, memory, vectors), max(sizes))
    return [
        tiles.view(torch.float16) if layout.fp16 else tiles
        for layout, tiles in zip(layouts, memory.split(sizes), strict=True)
    ]


def projection_weights(device="cpu"):
    """Return the weights of q, k and v, those of the narrow gate, and the taps of q, k and v."""
    wide = [torch.randn(512, 512, device=device) / 512**0.5 for _ in range(3)]
    narrow = torch.randn(64, 512, device=device) / 512**0.5
    taps = [torch.rand(512, 1, 4, device=device) - 0.5 for _ in range(3)]
    return wide, narrow, taps


def project(kernels, program, x, wide, narrow, taps, dtype):
    """Run the first stage: q, k and v in one tensor, and the narrow gate."""
    joined = taps_buffer(x)
    layouts = projection_layouts(kernels.GROUP, *wide, narrow)
    tiles = pack_weights(program, layouts, dtype, taps_layout(tuple(taps), joined))
    return kernels.launch_projection(program, x, tiles[0], joined, dtype)


def exact_projection(x, wide, narrow, taps, dtype):
    """Compute the first stage in float64, from x and weights rounded to `dtype`."""
    x = x.to(dtype).double()
    products = F.pad((x @ torch.cat(wide).to(dtype).double().T).T.unsqueeze(0), (3, 0))
    mixed = F.conv1d(products, torch.cat(taps).double(), groups=1536)
    return F.silu(mixed)[0].T, x @ narrow.to(dtype).double().T


def check_projection(results, expected, dtype):
    """Compare both results with float64, as a whole and in each row."""
    for result, exact in zip(results, expected, strict=True):
        assert result.dtype == dtype
        assert relative_rms(result, exact) <= PROJECTION[dtype]
        errors = (result.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert errors.max() <= 3 * PROJECTION[dtype]


def output_inputs(R, dtype, outputs=512, device="cpu"):
    """Return o with heads of different scales, narrow, and a layer's weights."""
    o = torch.randn(R, 8, 64, device=device) * (0.05 + torch.rand(R, 8, 1, device=device))
    narrow = torch.randn(R, 64, device=device)
    gate = (torch.rand(512, 64, device=device) - 0.5) / 2
    bias = (torch.rand(512, device=device) - 0.5) * 2
    norm = 1 + 0.3 * torch.randn(64, device=device)
    out = (torch.rand(outputs, 512, device=device) - 0.5) * 2 / 512**0.5
    return o.to(dtype), narrow.to(dtype), gate, bias, norm, out


def gated_output(kernels, program, o, narrow, gate, bias, norm, out):
    """Run the last stage: the gated norm and the output's product."""
    tiles = pack_weights(program, output_layouts(kernels.GROUP, gate, norm, out), o.dtype)
    return kernels.launch_output(program, o, narrow, tiles[0], bias, tiles[1], EPS)


def exact_output(*inputs):
    """Compute the last stage in float64."""
    o, narrow, gate, bias, norm, out = (x.double() for x in inputs)
    scale = (o.square().mean(-1, keepdim=True) + EPS).rsqrt()
    gates = torch.sigmoid(F.linear(narrow, gate, bias)).view_as(o)
    return F.linear((o * scale * norm * gates).flatten(1), out)


def apart(narrow):
    """Return the same values as a view with NaN between the rows."""
    R, S = narrow.shape
    wide = torch.full((R, 3 * S), float("nan"), dtype=narrow.dtype, device=narrow.device)
    wide[:, S : 2 * S] = narrow
    return wide[:, S : 2 * S]
