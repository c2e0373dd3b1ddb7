"""Repeated launches by Launcher give the results of Triton's launches, for all arguments."""

import pytest
import torch
from fla.ops.quasar.layer import kernels as layer_kernels
from fla.ops.quasar.triton_kernels.launch import Launcher

pytestmark = pytest.mark.gpu


class ThroughTriton(Launcher):
    """Forgets compiled kernels, so that Triton performs every launch."""

    def __call__(self, *args, **options):
        self._compiled = {}
        super().__call__(*args, **options)


def convolutions():
    torch.manual_seed(0)
    x = torch.randn(700, 1601, device="cuda", dtype=torch.bfloat16)
    taps = torch.randn(1536, 4, device="cuda")
    place = (torch.arange(700, device="cuda") % 33).int()
    for start, rows, position in (
        (0, 512, None),
        (1, 512, None),
        (0, 16, None),
        (0, 1, None),
        (1, 699, place),
        (0, 512, None),
    ):
        part = x[:rows, start : start + 1536]
        where = None if position is None else position[:rows].contiguous()
        yield layer_kernels.launch_conv_silu(part, taps, None, where)
        yield layer_kernels.launch_conv_silu(part.float(), taps, None, where)


def test_results_equal_those_of_triton_s_launches(monkeypatch):
    again = [*convolutions(), *convolutions()]
    assert any(layer_kernels._conv_silu._compiled.values())
    monkeypatch.setattr(
        layer_kernels, "_conv_silu", ThroughTriton(layer_kernels.causal_conv_silu_kernel)
    )
    bound = list(convolutions())
    for y, expected in zip(again, bound * 2, strict=True):
        assert torch.equal(y, expected)


def test_launches_use_the_current_stream():
    x = torch.randn(100_000, 1536, device="cuda", dtype=torch.bfloat16)
    taps = torch.randn(1536, 4, device="cuda")
    expected = layer_kernels.launch_conv_silu(x, taps, None, None)
    torch.cuda.synchronize()
    late = torch.zeros_like(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)  # only launches on this stream wait for it
        y = layer_kernels.launch_conv_silu(late, taps, None, None)
    side.synchronize()
    assert torch.equal(y, expected)
