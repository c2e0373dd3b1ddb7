"""Whether a GPU runs the portable fused kernels or library products: the faster of the two.

Both are timed once for each kind of GPU and each dtype. The cache folder stores the times.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from fla.ops.quasar import switches
from fla.ops.quasar.cache import cache_folder, write_whole
from fla.ops.quasar.cuda.program import CAPABILITY
from fla.ops.quasar.layer import library, portable
from fla.ops.quasar.layer.call import Call, Weights
from fla.ops.quasar.layer.hopper import is_hopper
from fla.ops.quasar.layer.weight_tiles import HEAD_DIM, HEADS, HIDDEN, TAPS, WIDTH
from fla.ops.quasar.triton_kernels.autotune import (
    GAIN,
    TOLERANCE,
    Gpu,
    one_at_a_time,
    sources_digest,
)

TOKENS = 1 << 15
"""Tokens of the timed calls, which fill a GPU and need 0.4 GB of memory."""
_ROUNDS = 7
_BUSY = 6144  # rows of a product in fp32 that takes some milliseconds
_log = logging.getLogger("fla.ops.quasar")
_chosen: dict[tuple[int, torch.dtype], bool] = {}
_choosing = threading.Lock()


def portable_is_faster(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether portable.py is faster than library.py; later calls read a dict.

    It returns False without a measurement on GPUs before compute capability 8.0, on Hopper, whose
    own kernels are faster than both, with QUASAR_AUTOTUNE=0, and while a CUDA graph is captured.

    Args:
        x: a tensor on the current CUDA device.
        dtype: of the products, bf16 or fp16.
    """
    key = (x.get_device(), dtype)
    if key not in _chosen and not torch.cuda.is_current_stream_capturing():
        with _choosing:
            if key not in _chosen:
                _chosen[key] = _choose(x, dtype)
    return _chosen.get(key, False)


def _choose(x: torch.Tensor, dtype: torch.dtype) -> bool:
    old = torch.cuda.get_device_capability(x.device) < CAPABILITY
    if old or is_hopper(x) or not switches.autotune():
        return False
    gpu = Gpu.of(x.device)
    text = repr((*gpu, dtype, torch.__version__, sources_digest()))
    path = cache_folder() / f"layer-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    with one_at_a_time(path):
        times = _read(path)
        if times is None:
            try:
                times = _measure(x.device, dtype)
            except Exception:
                # for example out of memory; library products may still fit
                _log.warning(
                    "the portable kernels could not be timed, so library products are used",
                    exc_info=True,
                )
                return False
            names = f"{gpu.name}, {str(dtype).removeprefix('torch.')}"
            _log.info(
                "the layer's stages on %s: fused %.2f ms, library %.2f ms; the faster ones are "
                "used; stored in %s; QUASAR_AUTOTUNE=0 switches this off",
                *(names, *times, path),
            )
            try:
                content = {"gpu": gpu.name, "fused_ms": times[0], "library_ms": times[1]}
                write_whole(path, json.dumps(content, indent=1).encode())
            except OSError as error:
                _log.info("the times could not be stored: %s", error)
    return times[0] < GAIN * times[1]


def _read(path: Path) -> tuple[float, float] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return float(content["fused_ms"]), float(content["library_ms"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.debug("%s cannot be used: %s", path, error)
        return None


def _measure(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the median milliseconds of the portable kernels and of the library, without operator.

    Raises:
        RuntimeError: the portable kernels cannot run here, or their results differ.
    """
    call, x, weights, o = _example(device, dtype)
    program = portable.find_program(x, dtype)
    if program is None:
        raise RuntimeError("the portable kernels cannot run on this GPU")

    def run(kernels: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
        p = kernels.project(program, call, x, weights, False, True)
        return p.qkv, kernels.output(program, call, o, p, x.shape)

    for found, expected in zip(run(portable), run(library), strict=True):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        if not error <= 2 * TOLERANCE[dtype]:  # also NaN
            raise RuntimeError(f"fused and library results differ by {error:.1e}, relative RMS")
    times = [(_milliseconds(run, portable), _milliseconds(run, library)) for _ in range(_ROUNDS)]
    fused_ms, library_ms = (sorted(each)[_ROUNDS // 2] for each in zip(*times, strict=True))
    return fused_ms, library_ms


def _milliseconds(run: Callable[[ModuleType], object], kernels: ModuleType) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The GPU computes this until all kernels are launched, so the host's time is not measured.
    busy = torch.ones(_BUSY, _BUSY, device="cuda")
    torch.mm(busy, busy)
    start.record()
    run(kernels)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _example(
    device: torch.device, dtype: torch.dtype
) -> tuple[Call, torch.Tensor, Weights, torch.Tensor]:
    """Return a call with its input and weights, and the operator's output."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the user's generator unchanged

    def noise(*shape: int) -> torch.Tensor:
        fan_in = shape[-1]
        return torch.randn(shape, device=device, generator=generator) / fan_in**0.5

    weights = Weights(
        *(noise(WIDTH, HIDDEN) for _ in range(3)),
        *(noise(HEAD_DIM, HIDDEN), noise(WIDTH, HEAD_DIM), noise(WIDTH)),
        *(noise(WIDTH, 1, TAPS) for _ in range(3)),
        *(None, None, None),
        *(noise(HEADS), noise(HEAD_DIM), noise(HIDDEN, WIDTH)),
    )
    x = noise(1, TOKENS, HIDDEN) * HIDDEN**0.5
    o = noise(TOKENS, HEADS, HEAD_DIM).to(dtype)
    return Call(HEADS, HEAD_DIM, 1e-5, dtype, None, "cuda"), x, weights, o


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
