"""tuned.json and the choice of tiles, without a GPU."""

import json
import re

import pytest
import torch
from fla.ops.quasar.cache import cache_folder
from fla.ops.quasar.triton_kernels import tiles as tiles_of
from fla.ops.quasar.triton_kernels.tiles import Gpu, parse_tiles, safe_tiles, tiles_for

from quasar_kernels.compile_specs import ARCHITECTURES
from quasar_kernels.contract import QUASAR_DIR, overlay_files

BLOCKS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CUDA = torch.device("cuda", 0)


def choose(monkeypatch, gpu, block=64, dtype=torch.bfloat16):
    monkeypatch.setattr(Gpu, "of", classmethod(lambda cls, device: gpu))
    return tiles_for.__wrapped__(block, dtype, CUDA)


def test_the_data_has_tiles_for_every_call_and_compiled_architecture():
    data = json.loads(tiles_of.DATA.read_text())
    assert QUASAR_DIR / "triton_kernels/tuned.json" in overlay_files()
    compiled = {f"{arch // 10}.{arch % 10}" for arch in ARCHITECTURES}
    assert {c for entry in data["safe"] for c in entry["capabilities"]} == compiled
    assert {entry["capability"] for entry in data["gpus"].values()} <= compiled
    for block in BLOCKS:
        for dtype in DTYPES:
            for name, entry in data["gpus"].items():
                assert tiles_of.known_tiles(Gpu(name, entry["capability"]), block, dtype)
            for capability in compiled:
                assert safe_tiles(block, dtype, capability)


def test_a_known_gpu_gets_its_measured_tiles(monkeypatch):
    rows = json.loads(tiles_of.DATA.read_text())["gpus"]["NVIDIA H200"]["tiles"]
    (row,) = [r for r in rows if 64 in r["blocks"] and "float16" in r["dtypes"]]
    chosen = choose(monkeypatch, Gpu("NVIDIA H200", "9.0"), 64, torch.float16)
    assert chosen._asdict() == row["tiles"]
    assert tiles_of.known_tiles(Gpu("NVIDIA H200", "8.0"), 64, torch.bfloat16) is None


@pytest.mark.parametrize("capability", ["8.0", "9.0", "13.0"])
def test_an_unknown_gpu_gets_safe_tiles_at_once(monkeypatch, capability):
    data = json.loads(tiles_of.DATA.read_text())
    faster = json.loads(json.dumps(data["gpus"]["NVIDIA H200"]))
    for row in faster["tiles"]:
        row["tiles"]["map_warps"] = 8
    data["gpus"]["NVIDIA Y"] = faster | {"capability": "9.0"}
    monkeypatch.setattr(tiles_of, "_data", lambda: data)
    assert choose(monkeypatch, Gpu("NVIDIA Y", "9.0")).map_warps == 8
    unknown = choose(monkeypatch, Gpu("A GPU of next year", capability))
    assert unknown == safe_tiles(64, torch.bfloat16)
    assert unknown.map_warps == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"waprs": 2}, "unknown fields ['waprs']"),
        ({"chunk": None}, "missing fields ['chunk']"),
        ({"map_warps": 3}, "map_warps is 3"),
        ({"map_rows": "64"}, "map_rows is '64'"),
        ({"map_rows": -1}, "map_rows is -1"),
    ],
)
def test_an_error_names_file_and_field(change, message):
    row = safe_tiles(64, torch.bfloat16)._asdict() | change
    row = {name: value for name, value in row.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_tiles(row, "tuned.json: 'NVIDIA H200', tiles[2]")
    assert str(caught.value).startswith("tuned.json: 'NVIDIA H200', tiles[2]: ")


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("QUASAR_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("QUASAR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/quasar"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/quasar"
