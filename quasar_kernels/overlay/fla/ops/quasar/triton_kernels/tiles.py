"""The block sizes of the chunk kernels, from tuned.json: nothing is tuned at run time.

tuned.json has the measured tiles of GPUs by name, and safe tiles by compute capability for all
other GPUs.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

DATA = Path(__file__).with_name("tuned.json")


class Tiles(NamedTuple):
    """Block sizes, warps and pipeline stages of the kernels."""

    chunk: int  # tokens of a chunk: 16, 32 or 64
    intra_chunks: int  # chunks that a program of the intra-chunk pass takes at once
    intra_warps: int
    intra_stages: int
    map_rows: int  # rows of (G, R) that a program of pass 1 owns
    map_warps: int
    map_stages: int
    scan_cols: int  # state columns that a program of the scan owns
    scan_warps: int
    value_cols: int  # state columns that a program of pass 2 owns
    output_warps: int
    output_stages: int
    grad_warps: int  # of the backward kernels; their programs hold whole states


class Gpu(NamedTuple):
    """A GPU: its name in the driver and its compute capability ("9.0"). Tiles depend on both."""

    name: str
    capability: str

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Return the driver's description of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.name, f"{properties.major}.{properties.minor}")


@functools.cache
def tiles_for(block: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Return the tiles of the chunk kernels.

    Args:
        block: channels of a head, padded to a power of two from 16 to 128.
        dtype: of q, k and v: bf16, fp16 or fp32.
        device: the tensors' device.

    Raises:
        ValueError: tuned.json does not fit `Tiles`, or has nothing for `block` and `dtype`.
    """
    if device.type != "cuda":
        return safe_tiles(block, dtype)  # the interpreter
    gpu = Gpu.of(device)
    return known_tiles(gpu, block, dtype) or safe_tiles(block, dtype, gpu.capability)


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


def parse_tiles(row: Any, where: str) -> Tiles:
    """Return the `Tiles` of a JSON object; `where` names the file and entry in errors.

    Raises:
        ValueError: fields are missing or unknown, or a value is out of range.
    """
    fields = set(Tiles._fields)
    if not isinstance(row, dict) or set(row) != fields:
        names = set(row) if isinstance(row, dict) else set()
        raise ValueError(
            f"{where}: missing fields {sorted(fields - names)}, unknown fields "
            f"{sorted(names - fields)}; it must have those of tiles.Tiles"
        )
    for name, value in row.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{where}: {name} is {value!r}; it must be a whole number from 0")
        if name.endswith("_warps") and value.bit_count() != 1:
            raise ValueError(f"{where}: {name} is {value}; it must be a power of two")
    return Tiles(**row)


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
