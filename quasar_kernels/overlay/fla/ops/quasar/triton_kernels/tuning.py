"""The choice of a call's tiles: from tuned.json for a known GPU, otherwise by an autotune.

tuned.json has the measured tiles of GPUs by name, and safe tiles by compute capability. A GPU that
it names is never tuned. For another GPU the first of these is used: the tiles of an earlier
autotune from the cache folder, those of a short autotune now (autotune.py), the safe tiles.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fla.ops.quasar import switches
from fla.ops.quasar.triton_kernels import autotune
from fla.ops.quasar.triton_kernels.autotune import Gpu, parse_tiles
from fla.ops.quasar.triton_kernels.tiles import Tiles

DATA = Path(__file__).with_name("tuned.json")

_chosen: dict[tuple[int, torch.dtype, int | None], Tiles] = {}
_choosing = threading.Lock()


def tiles_for(
    block: int,
    dtype: torch.dtype,
    device: torch.device,
    launch: Callable[..., torch.Tensor] | None = None,
) -> Tiles:
    """Return the tiles of the chunk kernels; later calls with equal arguments read a dict.

    Args:
        block: channels of a head, padded to a power of two from 16 to 128.
        dtype: of q, k and v: bf16, fp16 or fp32.
        device: the tensors' device. While a CUDA graph is captured, nothing is tuned or remembered.
        launch: `launch(tiles, q, k, v, beta) -> o` runs the forward pass, for the autotune; q, k, v
            and o `[1, T, H, block]`, beta `[H]` fp32. None: an unknown GPU is not tuned.

    Raises:
        ValueError: tuned.json does not fit `Tiles`, or has nothing for `block` and `dtype`.
    """
    key = (block, dtype, device.index)
    tiles = _chosen.get(key)
    if tiles is None:
        with _choosing:
            tiles, settled = _choose(block, dtype, device, launch)
            if settled:
                _chosen[key] = tiles
    return tiles


def _choose(
    block: int, dtype: torch.dtype, device: torch.device, launch: Callable[..., torch.Tensor] | None
) -> tuple[Tiles, bool]:
    # return the tiles, and whether later calls may use them, too
    if device.type != "cuda":
        return safe_tiles(block, dtype), True  # the interpreter
    gpu = Gpu.of(device)
    tiles = known_tiles(gpu, block, dtype)
    if tiles is not None:
        return tiles, True
    stored = autotune.read(gpu, block, dtype)
    if stored is not None:
        return stored, True
    default = safe_tiles(block, dtype, gpu.capability)
    if launch is None or not switches.autotune():
        return default, True
    if torch.cuda.is_current_stream_capturing():
        return default, False
    return autotune.tune(gpu, block, dtype, device, default, launch), True


def known_tiles(gpu: Gpu, block: int, dtype: torch.dtype) -> Tiles | None:
    """Return the tiles measured on a GPU of exactly this name and capability, or None."""
    entry = _data()["gpus"].get(gpu.name)
    if entry is None or entry["capability"] != gpu.capability:
        return None
    return _pick(gpu.name, entry, block, dtype)


def safe_tiles(block: int, dtype: torch.dtype, capability: str = "") -> Tiles:
    """Return tiles that any GPU of a compute capability ("8.6") can run; they need not be fast.

    A capability that tuned.json does not list gets the entry with the least shared memory.
    """
    entries = _data()["safe"]
    fallback = min(entries, key=lambda entry: entry["shared_kib"])
    entry = next((e for e in entries if capability in e["capabilities"]), fallback)
    return _pick(f"safe {entry['shared_kib']} KiB", entry, block, dtype)


def shipped_tiles(block: int, dtype: torch.dtype, capability: str) -> dict[str, Tiles]:
    """Return all tiles that GPUs of a compute capability may get from tuned.json, each once.

    Keys are names of GPUs, and "" for the safe tiles.
    """
    shipped = {"": safe_tiles(block, dtype, capability)}
    for name, entry in _data()["gpus"].items():
        tiles = _pick(name, entry, block, dtype)
        if entry["capability"] == capability and tiles not in shipped.values():
            shipped[name] = tiles
    return shipped


def _pick(name: str, entry: dict[str, Any], block: int, dtype: torch.dtype) -> Tiles:
    rows, kind = entry["tiles"], str(dtype).removeprefix("torch.")
    if isinstance(rows, str):  # the name of a GPU with the same tiles
        rows = _data()["gpus"][rows]["tiles"]
    for i, row in enumerate(rows):
        if block in row["blocks"] and kind in row["dtypes"]:
            return parse_tiles(row["tiles"], f"{DATA.name}: {name!r}, tiles[{i}]")
    raise ValueError(f"{DATA.name}: {name!r} has no tiles for heads of {block} in {kind}")


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
