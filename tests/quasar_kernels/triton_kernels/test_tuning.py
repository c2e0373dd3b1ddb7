"""tuned.json, the choice of tiles, and the autotune, without a GPU."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import re
import time

import pytest
import torch
from fla.ops.quasar.cache import cache_folder
from fla.ops.quasar.triton_kernels import autotune, tuning
from fla.ops.quasar.triton_kernels.autotune import Gpu, search

from quasar_kernels.compile_specs import ARCHITECTURES
from quasar_kernels.contract import QUASAR_DIR, overlay_files
from tests.processes import HANG

BLOCKS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CUDA = torch.device("cuda", 0)
UNKNOWN = Gpu("A GPU of next year", "8.6")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Use an empty cache folder, no remembered tiles, and an unknown GPU."""
    monkeypatch.setenv("QUASAR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("QUASAR_AUTOTUNE", raising=False)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(Gpu, "of", classmethod(lambda cls, device: UNKNOWN))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return tmp_path


@pytest.fixture
def tuned(monkeypatch):
    """Let each search return other tiles at once; the returned list receives its default."""
    searches = []

    def search(default, trial):
        searches.append(default)
        return better(default)

    monkeypatch.setattr(autotune, "search", search)
    monkeypatch.setattr(autotune, "_trial", lambda *arguments: None)
    return searches


def better(default):
    return default._replace(map_warps=default.map_warps * 2)


def launch(tiles, q, k, v, beta):
    return q + k + v


def choose(block=64, dtype=torch.bfloat16):
    return tuning.tiles_for(block, dtype, CUDA, launch)


def test_the_data_has_tiles_for_every_call_and_compiled_architecture():
    data = json.loads(tuning.DATA.read_text())
    assert QUASAR_DIR / "triton_kernels/tuned.json" in overlay_files()
    compiled = {f"{arch // 10}.{arch % 10}" for arch in ARCHITECTURES}
    assert {c for entry in data["safe"] for c in entry["capabilities"]} == compiled
    assert {entry["capability"] for entry in data["gpus"].values()} <= compiled
    for block in BLOCKS:
        for dtype in DTYPES:
            for name, entry in data["gpus"].items():
                assert tuning.known_tiles(Gpu(name, entry["capability"]), block, dtype)
            for capability in compiled:
                assert tuning.safe_tiles(block, dtype, capability)


def test_a_known_gpu_is_never_tuned(monkeypatch, tuned, folder):
    monkeypatch.setattr(Gpu, "of", classmethod(lambda cls, device: Gpu("NVIDIA H200", "9.0")))
    rows = json.loads(tuning.DATA.read_text())["gpus"]["NVIDIA H200"]["tiles"]
    (row,) = [r for r in rows if 64 in r["blocks"] and "float16" in r["dtypes"]]
    assert choose(64, torch.float16)._asdict() == row["tiles"]
    assert not tuned
    assert not list(folder.iterdir())


def test_a_name_with_another_capability_is_not_known():
    assert tuning.known_tiles(Gpu("NVIDIA H200", "8.0"), 64, torch.bfloat16) is None


def test_an_unknown_gpu_is_tuned_once_and_the_result_is_stored(monkeypatch, tuned, folder, caplog):
    default = tuning.safe_tiles(64, torch.bfloat16, UNKNOWN.capability)
    with caplog.at_level(logging.INFO, autotune.__name__):
        assert choose() == choose() == better(default)
    assert tuned == [default]
    begin, end = (record.getMessage() for record in caplog.records)
    assert UNKNOWN.name in begin
    assert "20 s" in begin
    assert "QUASAR_AUTOTUNE=0" in begin
    assert str(folder) in end
    monkeypatch.setattr(tuning, "_chosen", {})  # as in a new process
    assert choose() == better(default)
    assert len(tuned) == 1
    assert choose(32) != choose()
    assert choose(64, torch.float32).chunk
    assert len(tuned) == 3  # each width and dtype on its own


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(autotune, "sources_digest", lambda: "edited"),
        lambda patch: patch.setattr(autotune.triton, "__version__", "99.0"),
        lambda patch: patch.setattr(
            Gpu, "of", classmethod(lambda cls, device: UNKNOWN._replace(capability="8.9"))
        ),
    ],
    ids=["sources", "triton", "capability"],
)
def test_another_gpu_triton_or_kernel_needs_another_search(monkeypatch, tuned, change):
    choose()
    monkeypatch.setattr(tuning, "_chosen", {})
    change(monkeypatch)
    choose()
    assert len(tuned) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b'{"tiles": {"chunk": 16}}'])
def test_with_a_damaged_file_the_gpu_is_tuned_again(monkeypatch, tuned, folder, content):
    first = choose()
    (path,) = folder.glob("*.json")
    path.write_bytes(content)
    monkeypatch.setattr(tuning, "_chosen", {})
    assert choose() == first
    assert len(tuned) == 2
    assert json.loads(path.read_text())["tiles"] == first._asdict()


def test_without_a_writable_cache_the_process_remembers_the_tiles(monkeypatch, tuned, folder):
    (folder / "file").write_text("")
    monkeypatch.setenv("QUASAR_CACHE_DIR", str(folder / "file"))
    assert choose() == choose() == better(tuned[0])
    assert len(tuned) == 1


def test_the_autotune_can_be_disabled(monkeypatch, tuned):
    monkeypatch.setenv("QUASAR_AUTOTUNE", "0")
    assert choose() == tuning.safe_tiles(64, torch.bfloat16, UNKNOWN.capability)
    assert not tuned


def test_during_a_capture_nothing_is_tuned_but_at_the_next_call(monkeypatch, tuned):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose() == tuning.safe_tiles(64, torch.bfloat16, UNKNOWN.capability)
    assert not tuned
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert choose() == better(tuned[0])


def test_after_a_failed_search_the_safe_tiles_are_used(monkeypatch, folder, caplog):
    def fail(*arguments):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(autotune, "_trial", fail)
    assert choose() == tuning.safe_tiles(64, torch.bfloat16, UNKNOWN.capability)
    assert "failed" in caplog.text
    assert not list(folder.glob("*.json"))


def _tune_in_process(barrier, results):
    def slow(default, trial):
        with open(os.environ["QUASAR_CACHE_DIR"] + "/searches", "a") as file:
            file.write("one\n")
        time.sleep(0.5)
        return better(default)

    autotune.search = slow
    autotune._trial = lambda *arguments: None
    barrier.wait()
    results.put(tuple(choose()))


def test_of_two_processes_one_tunes_and_both_get_the_result(folder):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=_tune_in_process, args=(barrier, results)) for _ in range(2)]
    for process in both:
        process.start()
    tiles = {results.get(timeout=HANG) for _ in both}
    for process in both:
        process.join(HANG)
    assert tiles == {tuple(better(tuning.safe_tiles(64, torch.bfloat16, "8.6")))}
    assert (folder / "searches").read_text() == "one\n"


def test_the_search_keeps_faster_tiles_and_stops_in_time():
    default = tuning.safe_tiles(64, torch.bfloat16)

    def cost(tiles):
        if tiles.map_warps == 1:
            return math.inf  # does not compile, or computes something else
        warps = abs(math.log2(tiles.map_warps / 4)) + abs(math.log2(tiles.output_warps))
        return 10 + warps + 0.1 * (tiles.output_stages != 2)

    # a gain of a hundredth may be noise, so the stages do not change
    assert search(default, cost) == default._replace(map_warps=4, output_warps=1)
    late = iter([0.0, 1.0, autotune.BUDGET_SECONDS + 1])
    tried = []
    search(default, lambda tiles: tried.append(tiles) or 1.0, lambda: next(late))
    assert len(tried) == 2  # the default and one move
    assert all(t.chunk == default.chunk and t.grad_warps == default.grad_warps for t in tried)


def test_a_candidate_must_give_the_result_of_the_default(monkeypatch):
    monkeypatch.setattr(autotune, "_milliseconds", lambda launch, tiles, inputs: 1.0)
    monkeypatch.setattr(autotune, "_OPERAND_BYTES", 1 << 16)
    default = tuning.safe_tiles(16, torch.float32)
    broken = {
        default._replace(map_warps=8): lambda o: o * 1.01,
        default._replace(map_warps=2): lambda o: o.index_fill(1, torch.tensor([3]), math.nan),
        default._replace(map_stages=4): lambda o: 1 / 0,
        default._replace(scan_warps=1): lambda o: o * (1 + 1e-6),
    }
    before = torch.get_rng_state()
    trial = autotune._trial(
        16,
        torch.float32,
        torch.device("cpu"),
        default,
        lambda tiles, *inputs: broken.get(tiles, lambda o: o)(launch(tiles, *inputs)),
    )
    assert [trial(tiles) for tiles in (default, *broken)] == [1.0, *[math.inf] * 3, 1.0]
    assert torch.equal(before, torch.get_rng_state())


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
    row = tuning.safe_tiles(64, torch.bfloat16)._asdict() | change
    row = {name: value for name, value in row.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        autotune.parse_tiles(row, "tuned.json: 'NVIDIA H200', tiles[2]")
    assert str(caught.value).startswith("tuned.json: 'NVIDIA H200', tiles[2]: ")


def test_the_cache_folder(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path
    monkeypatch.delenv("QUASAR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/quasar"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/quasar"
