"""FORK_SCOPE=ops: the operator under a layer that calls it as the public fork's layer does."""

import importlib.util
import shutil
from pathlib import Path

import torch
from fla.layers.quasar import QuasarAttention

from harness.measuring.runner import Options, check, require_passed
from quasar_kernels.contract import LAYER_FILE, OVERLAY, check_tree, overlay_files
from quasar_kernels.reference import relative_rms
from tests.quasar_kernels.layer.public_layer import QuasarAttention as PublicLayer
from tests.small_fla import shrink

SIZES = {"hidden_size": 48, "head_dim": 16, "num_heads": 3}


def test_a_tree_with_only_the_operator_passes_the_correctness_check(tmp_path):
    places = importlib.util.find_spec("fla").submodule_search_locations
    installed = next(place for place in places if "site-packages" in place)
    ignore = shutil.ignore_patterns("__pycache__", "quasar")
    shutil.copytree(installed, tmp_path / "fla", ignore=ignore)
    for name in overlay_files("ops"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(OVERLAY / name, tmp_path / name)
    (tmp_path / LAYER_FILE).parent.mkdir()
    shrink(tmp_path)
    shutil.copyfile(Path(__file__).with_name("public_layer.py"), tmp_path / LAYER_FILE)
    assert check_tree(tmp_path) == []
    require_passed(check(tmp_path, 512, Options("cpu")))  # against float64, gradients too


def test_the_parameters_are_those_of_the_public_layer():
    layer, ours, x = PublicLayer(**SIZES), QuasarAttention(**SIZES), torch.randn(1, 40, 48)
    assert 0 <= ours.beta_log.min() <= ours.beta_log.max() <= torch.tensor(16.0).log()
    ours.load_state_dict(layer.state_dict(), strict=True)
    assert relative_rms(ours(x)[0], layer(x)[0].double()) <= 1e-5
