"""chunk_quasar in Triton: all widths and dtypes, segments, gradients."""

import pytest
import torch
from fla.ops.quasar import chunk_quasar
from fla.ops.quasar.operator_types import ScanInputs
from fla.ops.quasar.triton_kernels.passes import forward, plan_segments

from quasar_kernels.reference import quasar_chunked, relative_rms
from tests.gpu.calls import layer_like
from tests.quasar_kernels.float64 import with_float64
from tests.quasar_kernels.inputs import assert_close
from tests.quasar_kernels.tolerances import GRADIENT, OPERATOR

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _in_triton(monkeypatch):
    monkeypatch.setenv("QUASAR_BACKEND", "triton")


def test_the_number_of_segments_changes_only_the_rounding():
    inputs = layer_like(6000)
    expected, _ = quasar_chunked(*inputs)
    for n in (1, 2, 7, 50, 375):
        plan = plan_segments(inputs[0], None, segments=n)
        o = forward(ScanInputs.of(*inputs), plan=plan).o
        assert_close(o, expected, OPERATOR[torch.bfloat16])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", GRADIENT)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (3, 32), (2, 128), (1, 48)])
def test_results_and_gradients_match_float64(packed, dtype, heads, width):
    T, B, n = (700, 1, 3) if packed else (700, 2, 2)
    inputs = layer_like(T, B, H=heads, S=width, dtype=dtype)
    cu = torch.tensor([0, 200, 200, T], device="cuda") if packed else None
    initial = torch.randn(n, heads, width, width, device="cuda")
    found, wanted = with_float64(
        lambda *x: chunk_quasar(*x, True, cu), lambda *x: quasar_chunked(*x, cu), *inputs, initial
    )
    assert_close(found[0], wanted[0], OPERATOR[dtype])
    for name, x, w in zip("qkvbs", found[2:], wanted[2:], strict=True):
        # the terms of beta's gradient cancel, so its relative error is larger
        assert relative_rms(x, w) <= (1e-1 if name == "b" else 1e-2)


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_and_grad_mode_change_nothing(grad):
    inputs = layer_like(640)
    expected, _ = chunk_quasar(*inputs)
    with torch.set_grad_enabled(grad), torch.autocast("cuda", torch.bfloat16):
        o, _ = chunk_quasar(*(x.requires_grad_(grad) for x in inputs))
    assert torch.equal(o, expected)
