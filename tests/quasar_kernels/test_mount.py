"""Where `fla.ops.quasar` and the layer come from: mounted, in a fork's tree, beside a rival."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from quasar_kernels.contract import OVERLAY
from tests.processes import run_python
from tests.small_fla import install_small_fla


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process with `path` first on sys.path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return run_python("-W", "ignore", "-c", code, env=env)


def test_mounting_serves_the_overlay_and_keeps_fla_core(tmp_path):
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


def test_mounting_after_another_copy_is_refused(tmp_path):
    rival = tmp_path / "rival" / "ops"
    shutil.copytree(OVERLAY / "fla" / "ops" / "quasar", rival / "quasar")
    code = f"""
import fla.ops
fla.ops.__path__.insert(0, {str(rival)!r})
import fla.ops.quasar
from quasar_kernels.mount import mount
mount()
"""
    done = run(code, Path(install_small_fla(tmp_path / "host")))
    assert done.returncode == 1
    assert "RuntimeError: fla.ops.quasar" in done.stderr
    assert str(tmp_path) in done.stderr


@pytest.mark.slow
def test_a_fork_made_of_fla_core_and_the_overlay_needs_no_mount(tmp_path):
    """What a validator does: the tree first on sys.path, the layer imported, one call."""
    spec = importlib.util.find_spec("fla")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    shutil.copytree(installed, tmp_path / "fla", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(OVERLAY / "fla", tmp_path / "fla", dirs_exist_ok=True)
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
