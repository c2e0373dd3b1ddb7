"""The block sizes of the chunk kernels; tuning.py chooses those of a call."""

from __future__ import annotations

from typing import NamedTuple


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
    grad_warps: int  # of the backward kernels, whose programs hold whole states


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
