"""Runs interpreted_*.py in a process with TRITON_INTERPRET=1."""

import os
from pathlib import Path

import pytest

from tests import PROJECT
from tests.processes import HANG, run_python
from tests.small_fla import install_small_fla


@pytest.mark.slow
def test_kernels_under_the_interpreter(tmp_path):
    """One process runs all files, because importing torch and fla takes longer than some of them.

    It loads no pytest plugins and a small fla.
    """
    files = sorted(Path(__file__).parent.glob("interpreted_*.py"))
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([install_small_fla(tmp_path), str(PROJECT)]),
    }
    done = run_python("-m", "pytest", "-p", "no:cacheprovider", *files, env=env, timeout=2 * HANG)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
