"""Which files `fla.ops.quasar` and the layer are loaded from, if they are mounted."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from quasar_kernels.contract import OVERLAY
from quasar_kernels.fla_package import lay_over_fla
from tests.processes import run_python
from tests.repositories import write_files
from tests.small_fla import install_small_fla


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process without a GPU, with `path` first on sys.path."""
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(map(str, path))}
    return run_python("-c", code, env={**os.environ, **env})


def test_mounting_loads_the_overlay_without_warnings_and_without_cuda_libraries(tmp_path):
    """One process makes all checks, because it takes seconds to import torch and fla."""
    code = """
from quasar_kernels.blocks import HybridBlock, ssd, wkv6
from quasar_kernels.mount import mount
mount(); mount()
import fla.layers.quasar, fla.ops.quasar, fla.ops.quasar.chunk, fla.ops.delta_rule, fla.utils
for module in (fla.layers.quasar, fla.ops.quasar, fla.ops.quasar.chunk, fla.ops.delta_rule):
    print(module.__file__)
from fla.ops.quasar.cuda import driver, nvrtc
print(driver._driver.cache_info().currsize + nvrtc.load_library.cache_info().currsize)

mount(adaptive=True)  # for the code of public models
from fla.layers.quasar import QuasarAttention
layer = QuasarAttention(64, 16, 4, expand_v=1.0, num_v_heads=None, allow_neg_eigval=False)
print(QuasarAttention.__name__, *layer.state_dict())
assert "beta_log" in str(HybridBlock(32, 2, ("quasar",)).state_dict().keys())
"""
    done = run(code, Path(install_small_fla(tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")
    *modules, loaded, adaptive = done.stdout.splitlines()
    layer, package, chunk, other = map(Path, modules)
    assert layer == OVERLAY / "fla/layers/quasar.py"
    assert package == OVERLAY / "fla/ops/quasar/__init__.py"
    assert chunk == OVERLAY / "fla/ops/quasar/chunk.py"
    assert OVERLAY not in other.parents
    assert loaded == "0"
    name, *parameters = adaptive.split()
    assert name == "AdaptiveQuasarAttention"
    assert {"b_proj.weight", "A_log", "dt_bias", "f_proj.weight"} <= set(parameters)


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


LAYERS = "from fla.layers.delta_net import DeltaNet\n\n__all__ = ['DeltaNet']\n"
MODELS = "from fla.layers.delta_net import DeltaNet\n\n__all__ = []\n"


@pytest.fixture(params=["sys", "a_missing_library"])
def site(request, tmp_path):
    """A folder with fla-core and a package that adds layers and models, which import a library."""
    folder = tmp_path / "site"
    install_small_fla(folder)
    initial = folder / "fla/__init__.py"
    assert "extend_path" in initial.read_text()  # fla-core's: it merges all folders named fla
    files = {
        "layers/__init__.py": LAYERS,
        "layers/delta_net.py": f"import {request.param}\n\n\nclass DeltaNet:\n    pass\n",
        "layers/quasar.py": "raise SystemExit('the other package has replaced the layer')\n",
        "models/__init__.py": MODELS,
    }
    write_files(folder / "fla", files)
    return folder, request.param == "sys"


def test_mounting_wins_over_a_package_with_layers(site):
    folder, complete = site
    code = """
from quasar_kernels.mount import mount
mount()
import fla.layers.quasar, fla.ops.quasar
print(fla.layers.quasar.__file__)
from fla.layers import DeltaNet
"""
    done = run(code, folder)
    assert done.stdout.split() == [str(OVERLAY / "fla/layers/quasar.py")], done.stderr
    assert (done.returncode == 0) is complete, done.stderr
    if not complete:
        needed = "fla.layers needs a_missing_library for DeltaNet: install a_missing_library"
        assert needed in done.stderr


@pytest.mark.parametrize("site", ["a_missing_library"], indirect=True)
def test_a_tree_wins_over_a_package_with_layers(site, tmp_path):
    folder, _ = site
    tree = tmp_path / "tree"
    lay_over_fla(OVERLAY, tree)
    (tree / "fla/ops/__init__.py").write_text("")  # imports less
    done = run("import fla.layers.quasar; print(fla.layers.quasar.__file__)", tree, folder)
    assert done.stdout.split() == [str(tree / "fla/layers/quasar.py")], done.stderr
