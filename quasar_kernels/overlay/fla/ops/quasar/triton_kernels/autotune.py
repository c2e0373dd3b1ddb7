"""A short autotune of the chunk kernels' tiles, for a GPU without measured tiles.

It changes the fields of `Tiles` one after the other: warps, stages and chunks by one step up and
down, rows and columns by one step down. It omits the chunk's tokens, which affect the rounding, and
the backward pass's warps. It keeps a change that is faster and gives the same output. The cache
folder stores the result.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from fla.ops.quasar.cache import cache_folder, write_whole
from fla.ops.quasar.triton_kernels.tiles import Tiles

BUDGET_SECONDS = 20.0
"""Seconds after which no further trial starts; a trial takes a few seconds with its compilation."""
GAIN = 0.97
"""A change is kept if its time is below this share of the best time: smaller gains may be noise."""
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""Relative RMS by which a candidate's output may differ from the default's, for rounding."""

_HEADS = 8
_CALLS = 7  # timed ones of each candidate
_OPERAND_BYTES = 64 << 20  # 65,536 tokens of 8 heads of 64 in bf16: fills a GPU, fits on any
_log = logging.getLogger(__name__)


class Gpu(NamedTuple):
    """A GPU: its name in the driver and its compute capability ("9.0"). Tiles depend on both."""

    name: str
    capability: str

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Return the driver's description of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.name, f"{properties.major}.{properties.minor}")


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


def moves(tiles: Tiles) -> Iterator[tuple[str, int]]:
    """Yield the changes to try as (field, value): factors of two, or one stage more or less."""
    for name, value in tiles._asdict().items():
        steps: list[int] = []
        if name.startswith("grad"):
            pass  # only the forward pass is timed
        elif name.endswith("_warps"):
            steps = [w for w in (value // 2, value * 2) if 1 <= w <= 8]
        elif name.endswith("_stages"):
            steps = [s for s in (value - 1, value + 1) if 1 <= s <= 4]
        elif name.endswith("_chunks"):
            steps = [n for n in (value // 2, value * 2) if n]
        elif name.endswith(("_rows", "_cols")) and value >= 32:
            steps = [value // 2]
        for step in steps:
            yield name, step


def search(
    default: Tiles, trial: Callable[[Tiles], float], clock: Callable[[], float] = time.monotonic
) -> Tiles:
    """Return the best tiles of a greedy search from `default` within `BUDGET_SECONDS`.

    Args:
        trial: returns the time of a call with the given tiles, in any unit; infinity if the call
            fails or its output differs.
    """
    end = clock() + BUDGET_SECONDS
    best, best_time = default, trial(default)
    for name, value in moves(default):
        if clock() >= end:
            break
        candidate = best._replace(**{name: value})
        duration = trial(candidate)
        if duration < GAIN * best_time:
            best, best_time = candidate, duration
    return best


def tune(
    gpu: Gpu,
    block: int,
    dtype: torch.dtype,
    device: torch.device,
    default: Tiles,
    launch: Callable[..., torch.Tensor],
) -> Tiles:
    """Tune on this GPU and store the result; return `default` if that fails.

    Arguments are those of `tuning.tiles_for`. If several processes start at the same time, one
    tunes, and the others read its result.
    """
    path = _path(gpu, block, dtype)
    with one_at_a_time(path):
        stored = read(gpu, block, dtype)
        if stored is not None:
            return stored
        what = f"{gpu.name}, heads of {block} in {str(dtype).removeprefix('torch.')}"
        _log.info(
            "tuning the chunk kernels for %s: once, up to about %d s; QUASAR_AUTOTUNE=0 switches "
            "this off",
            what,
            BUDGET_SECONDS,
        )
        start = time.monotonic()
        try:
            tiles = search(default, _trial(block, dtype, device, default, launch))
        except Exception:
            # for example out of memory; the caller's call may succeed, or raise the error itself
            _log.warning("tuning for %s failed; safe tiles are used", what, exc_info=True)
            return default
        seconds = time.monotonic() - start
        _log.info("tuned for %s in %.1f s: %s, stored in %s", what, seconds, tiles, path)
        content = {"gpu": gpu.name, "capability": gpu.capability, "tiles": tiles._asdict()}
        try:
            write_whole(path, json.dumps(content, indent=1).encode())
        except OSError as error:
            _log.info("the tiles could not be stored: %s", error)
        return tiles


def _trial(
    block: int,
    dtype: torch.dtype,
    device: torch.device,
    default: Tiles,
    launch: Callable[..., torch.Tensor],
) -> Callable[[Tiles], float]:
    # return the trial for `search`, in milliseconds (the median)
    generator = torch.Generator(device).manual_seed(0)  # leaves the user's generator unchanged
    tokens = _OPERAND_BYTES // (_HEADS * block * dtype.itemsize)
    shape = (1, tokens, _HEADS, block)
    q, k, v = (
        F.silu(torch.randn(shape, device=device, dtype=dtype, generator=generator) / 3)
        for _ in range(3)
    )
    inputs = (q, k, v, torch.linspace(1, 2, _HEADS, device=device))
    expected = launch(default, *inputs).float()
    scale = expected.square().mean().sqrt()

    def trial(tiles: Tiles) -> float:
        # the allocator reuses this memory: elements that the kernel does not write are then NaN
        poison = torch.full_like(q, float("nan"))
        del poison
        try:
            error = (launch(tiles, *inputs).float() - expected).square().mean().sqrt() / scale
            # the comparison is false for NaN
            return _milliseconds(launch, tiles, inputs) if error <= TOLERANCE[dtype] else math.inf
        except Exception as error:
            # it needs too many resources, or cannot be compiled: reject this candidate
            _log.debug("%s: %s", tiles, error)
            return math.inf

    return trial


def _milliseconds(
    launch: Callable[..., torch.Tensor],
    tiles: Tiles,
    inputs: tuple[torch.Tensor, ...],
) -> float:
    times = []
    for _ in range(_CALLS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch(tiles, *inputs)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[_CALLS // 2]


def read(gpu: Gpu, block: int, dtype: torch.dtype) -> Tiles | None:
    """Return the tiles that an earlier autotune stored; None without a valid file."""
    path = _path(gpu, block, dtype)
    try:
        return parse_tiles(json.loads(path.read_text(encoding="utf-8"))["tiles"], str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.debug("%s cannot be used: %s", path, error)
        return None


def _path(gpu: Gpu, block: int, dtype: torch.dtype) -> Path:
    key = (*gpu, block, str(dtype), triton.__version__, sources_digest())
    return cache_folder() / f"tiles-{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.json"


@functools.cache
def sources_digest() -> str:
    """Return a digest of all sources, because their changes need a new choice."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(
        p for kind in ("py", "json", "cu", "cuh") for p in folder.rglob(f"*.{kind}")
    ):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let other processes that choose for `path` wait, because timings disturb each other."""
    # without file locks the disturbance is accepted
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            end = time.monotonic() + 3 * BUDGET_SECONDS  # the other process may hang
            while time.monotonic() < end:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
