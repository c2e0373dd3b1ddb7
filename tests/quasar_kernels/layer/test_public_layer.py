"""FORK_SCOPE=ops: the operator under a layer that calls it as the public fork's own does."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from fla.layers.quasar import QuasarAttention, QuasarCache

from harness.measuring.runner import Options, check, confirm, measure
from quasar_kernels.contract import LAYER_FILE, OVERLAY, check_tree, overlay_files
from quasar_kernels.reference import quasar_layer, relative_rms
from tests.quasar_kernels.layer.public_layer import QuasarAttention as PublicLayer
from tests.quasar_kernels.layer.steps import exact_step, step
from tests.small_fla import shrink

SIZES = {"hidden_size": 48, "head_dim": 16, "num_heads": 3}


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return PublicLayer(**SIZES, layer_idx=0)


def reference(layer, x):
    return quasar_layer(layer.state_dict(keep_vars=True), x, num_heads=3, head_dim=16)


def test_a_tree_of_the_operator_alone_passes_the_harness(tmp_path):
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
    correctness = check(tmp_path, 512, Options("cpu"))  # against float64, gradients too
    assert confirm(measure(tmp_path, 512, Options("cpu")), correctness).tokens_per_sec > 0


def test_output_and_gradients_under_autocast(layer):
    x, dy = torch.randn(2, 2, 130, 48)
    found, wanted = step(layer, x, dy, torch.bfloat16), exact_step(layer, x, dy)
    for name, gradient in wanted.items():
        assert relative_rms(found[name], gradient) <= (2e-2 if name == "y" else 6e-2), name


def test_the_cache_and_packed_sequences(layer):
    x = torch.randn(1, 70, 48)
    cache = QuasarCache()
    with torch.no_grad():
        parts = [
            layer(part, past_key_values=cache, use_cache=True)[0]
            for part in x.split([50, 1, 1, 18], dim=1)
        ]
        packed = layer(x, cu_seqlens=torch.tensor([0, 30, 70]))[0]
        expected = reference(layer, x)
        alone = [reference(layer, part) for part in x.split([30, 40], dim=1)]
    assert relative_rms(torch.cat(parts, 1), expected) <= 1e-5
    assert relative_rms(packed, torch.cat(alone, 1)) <= 1e-5


def test_checkpoints_load_strictly_both_ways(layer):
    x = torch.randn(1, 40, 48)
    ours = QuasarAttention(**SIZES)
    ours.load_state_dict(layer.state_dict(), strict=True)
    assert relative_rms(ours(x)[0], layer(x)[0].double()) <= 1e-5
    fresh = PublicLayer(**SIZES, layer_idx=0)
    fresh.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(fresh(x)[0], layer(x)[0])
