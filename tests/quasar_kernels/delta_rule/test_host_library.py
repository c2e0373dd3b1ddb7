"""`python -m tests.host_library`, on a folder with small files in the places of fla's tests."""

from __future__ import annotations

from tests.processes import run_python

TEST_DELTA = """
import torch
from fla.ops.delta_rule import chunk_delta_rule
from fla.utils import device
from quasar_kernels.delta_rule import chunk_delta_rule as ours

def test_ours_is_called():
    q, k, v = (torch.randn(1, 70, 2, 16, device=device) for _ in range(3))
    beta = torch.rand(1, 70, 2, device=device)
    k = torch.nn.functional.normalize(k, dim=-1)
    assert torch.equal(chunk_delta_rule(q, k, v, beta)[0], ours(q, k, v, beta)[0])

def test_flash_qla_is_not_ours():
    assert False
"""
CONFTEST = """
import pytest
from fla.utils import device_torch_lib

@pytest.fixture(autouse=True)
def _wait():
    yield
    device_torch_lib.synchronize()
"""
TEST_GDN = """
def test_that_fails():
    assert False
"""


def test_the_tests_of_a_checkout_run_against_these_kernels(tmp_path):
    folder = tmp_path / "tests/ops"
    folder.mkdir(parents=True)
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    done = run_python("-m", "tests.host_library", tmp_path)
    assert done.returncode == 2
    assert "give a checkout" in done.stderr
    (folder / "test_delta.py").write_text(TEST_DELTA)
    (folder / "test_gdn.py").write_text(TEST_GDN)
    done = run_python("-m", "tests.host_library", tmp_path)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
