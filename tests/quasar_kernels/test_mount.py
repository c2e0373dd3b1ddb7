"""Which files `fla.ops.quasar` and the layer are loaded from, mounted and in a fork's tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from quasar_kernels.contract import OVERLAY
from quasar_kernels.fla_package import lay_over_fla
from tests.processes import run_python
from tests.small_fla import install_small_fla


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process with `path` first on sys.path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return run_python("-W", "ignore", "-c", code, env=env)


def test_mounting_loads_the_overlay_and_keeps_fla_core(tmp_path):
    code = """
from quasar_kernels.mount import mount
mount(); mount()
import fla.layers.quasar, fla.ops.quasar, fla.ops.quasar.chunk, fla.ops.delta_rule, fla.utils
for module in (fla.layers.quasar, fla.ops.quasar, fla.ops.quasar.chunk, fla.ops.delta_rule):
    print(module.__file__)
"""
    done = run(code, Path(install_small_fla(tmp_path)))
    assert done.returncode == 0, done.stderr
    layer, package, chunk, other = map(Path, done.stdout.split())
    assert layer == OVERLAY / "fla/layers/quasar.py"
    assert package == OVERLAY / "fla/ops/quasar/__init__.py"
    assert chunk == OVERLAY / "fla/ops/quasar/chunk.py"
    assert OVERLAY not in other.parents


def test_mounting_fails_if_another_copy_is_loaded(tmp_path):
    other = tmp_path / "other" / "ops"
    shutil.copytree(OVERLAY / "fla" / "ops" / "quasar", other / "quasar")
    code = f"""
import fla.ops
fla.ops.__path__.insert(0, {str(other)!r})
import fla.ops.quasar
from quasar_kernels.mount import mount
mount()
"""
    done = run(code, Path(install_small_fla(tmp_path / "fla")))
    assert done.returncode == 1
    assert "RuntimeError: fla.ops.quasar" in done.stderr
    assert str(tmp_path) in done.stderr


@pytest.mark.slow
def test_a_fork_made_of_fla_core_and_the_overlay_needs_no_mount(tmp_path):
    """As a validator: the tree is first on sys.path, the layer is imported and called."""
    lay_over_fla(OVERLAY, tmp_path)
    code = """
import torch
from fla.layers.quasar import QuasarAttention
import fla.ops.quasar.chunk
layer = QuasarAttention(hidden_size=64, head_dim=16, num_heads=2, mode="chunk", use_short_conv=True)
with torch.no_grad():
    print(*layer(torch.randn(1, 100, 64))[0].shape)
print(fla.ops.quasar.chunk.__file__)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    shape, source = done.stdout.splitlines()
    assert shape == "1 100 64"
    assert Path(source).is_relative_to(tmp_path)
