"""Run the Triton kernels' tests under Triton's interpreter, in a process that starts with it on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.processes import run_python


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["kernels", "training", "delta_rule", "wkv6", "ssd"],
)
def test_kernels_under_the_interpreter(name):
    tests = Path(__file__).with_name(f"interpreted_{name}.py")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = run_python("-m", "pytest", "-p", "no:cacheprovider", tests, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
