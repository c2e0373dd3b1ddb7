"""SSD: state sizes, errors, and the call of mamba_ssm's kernels."""

import sys
import types

import pytest
import torch

from quasar_kernels.blocks.ssd import OPERATOR as SSD
from quasar_kernels.blocks.ssd import ssd
from quasar_kernels.decay_reference import ssd_recurrence
from tests.quasar_kernels.blocks.calls import ssd_inputs
from tests.quasar_kernels.float64 import check
from tests.quasar_kernels.inputs import packed
from tests.quasar_kernels.tolerances import OPERATOR

LIMIT = OPERATOR[torch.float32]
STATE = (4, 16, 24)


@pytest.mark.parametrize("N", [16, 128])
def test_state_sizes_without_a_skip(N):
    x = ssd_inputs(70, N=N)[:5]
    check(ssd(*x), ssd_recurrence(*x), LIMIT)


def test_invalid_arguments():
    x, dt, A, B, C, D = ssd_inputs(10, B=2)
    for arguments, words in (
        ((x[0], dt, A, B, C), r"x must have shape \[batch, T, H, P\]"),
        ((x[:, :, :3], dt, A, B, C), "got 3 and 2"),
        ((x, dt[..., 1:], A, B, C), "dt must have shape"),
        ((x, dt, A[1:], B, C), "A must have shape"),
        ((x, dt, A, B, C[..., 1:]), "C must have shape"),
        ((x, dt, A, B[:, 1:], C[:, 1:]), "B must have shape"),
        ((x, dt, A, B, C, D[1:]), "D must have shape"),
        ((x, dt, A, B, C, D, torch.zeros(1, *STATE)), "one state per sequence"),
        ((x, dt, A, B, C, D, None, packed([10])), "B must be 1"),
    ):
        with pytest.raises(ValueError, match=words):
            ssd(*arguments)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, *, D, initial_states, return_final_states
):
    """A fake with these parameters of mamba_ssm's function, whose states are `[batch, H, P, N]`."""
    assert return_final_states
    y, final = ssd_recurrence(x, dt, A, B, C, D, initial_states.mT, dtype=torch.float32)
    return y, final.mT


def test_the_call_of_mamba_ssm_s_kernels(monkeypatch):
    """The package needs a GPU, so a fake with its signature replaces it."""
    module = types.ModuleType("ssd_combined")
    module.mamba_chunk_scan_combined = mamba_chunk_scan_combined
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", module)
    x, state = ssd_inputs(20, B=2), torch.randn(2, *STATE)
    check(SSD.named("mamba_ssm").call(*x, state, None), ssd_recurrence(*x, state), LIMIT)
