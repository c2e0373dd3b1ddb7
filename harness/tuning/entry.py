"""Reads and writes a GPU's entry in an overlay's tuned.json."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.tuning.inputs import WIDTH
from quasar_kernels.contract import QUASAR_DIR

TUNED = Path(QUASAR_DIR) / "triton_kernels/tuned.json"
KIND = "bfloat16"


def tiles_of(data: Mapping[str, Any], gpu: Mapping[str, str]) -> dict[str, int]:
    """Return the tiles in tuned.json for heads of WIDTH in bf16; empty if there are none."""
    entry = data["gpus"].get(gpu["gpu"])
    if entry is None or entry["capability"] != gpu["capability"]:
        return {}
    fitting = (
        row["tiles"]
        for row in _rows(data, entry)
        if WIDTH in row["blocks"] and KIND in row["dtypes"]
    )
    return dict(next(fitting, {}))


def with_tiles(data: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `data` with the tiles of a search's result before the other rows of its GPU.

    A GPU that had no entry gets the safe tiles of its capability for everything else.
    """
    name, capability = result["gpu"], result["capability"]
    entry = data["gpus"].get(name)
    if entry is None or entry["capability"] != capability:
        safe = data["safe"]
        least = min(safe, key=lambda one: one["shared_kib"])
        entry = next((one for one in safe if capability in one["capabilities"]), least)
    row = {"blocks": [WIDTH], "dtypes": [KIND], "tiles": result["tiles"]}
    old = [
        one
        for one in _rows(data, entry)
        if not (one["blocks"] == row["blocks"] and one["dtypes"] == row["dtypes"])
    ]
    gain = result["evidence"]["gain"]
    measured = (
        f"scripts/step2_kernel_tuning.py searched heads of {WIDTH} in {KIND} on this GPU: "
        f"{result['evidence']['trials']} trials, {gain['ratio'] - 1:+.1%} at "
        f"{result['lengths'][-1]} tokens (99% interval {gain['low'] - 1:+.1%} to "
        f"{gain['high'] - 1:+.1%})"
    )
    new = {"capability": capability, "measured": measured, "tiles": [row, *old]}

    def own(other: dict[str, Any]) -> dict[str, Any]:
        # a GPU that refers to this GPU's rows keeps the old ones
        return {**other, "tiles": _rows(data, other)} if other["tiles"] == name else other

    gpus = {other: own(value) for other, value in data["gpus"].items()} | {name: new}
    return {**data, "gpus": gpus, "safe": [own(one) for one in data["safe"]]}


def _rows(data: Mapping[str, Any], entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a copy of an entry's rows; the entry may refer to another GPU's."""
    rows = entry["tiles"]
    return copy.deepcopy(data["gpus"][rows]["tiles"] if isinstance(rows, str) else rows)
