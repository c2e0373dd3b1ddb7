"""What counts as recorded by autograd."""

from __future__ import annotations

import pytest
import torch
from fla.ops.quasar.device import is_recorded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_forward_mode_counts_on_a_gpu(context):
    with FakeTensorMode(), context():
        x, on_cpu = torch.empty(2, device="cuda"), torch.empty(2)
        assert not is_recorded(x, None)
        with forward_ad.dual_level():
            assert is_recorded(None, x)
            assert not is_recorded(on_cpu)
        assert not is_recorded(x)


def test_gradients_count_unless_they_are_disabled():
    x, other = torch.empty(2, requires_grad=True), torch.empty(2)
    assert is_recorded(None, other, x)
    assert not is_recorded(other)
    with torch.no_grad():
        assert not is_recorded(x)
