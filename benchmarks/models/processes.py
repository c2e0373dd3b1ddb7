"""A call in a process group of torch.distributed, with one process for each GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def in_group(world: int, kind: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function(device, *arguments)` in `world` processes; return the result of rank 0.

    Args:
        kind: `cuda` (NCCL, one GPU for each process) or `cpu` (gloo).
        function: must be picklable, as must its arguments, because new processes import it.

    Raises:
        Exception: a process failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (world, kind, Path(folder), function, arguments), world)  # type: ignore[no-untyped-call]
        return torch.load(Path(folder) / "result", weights_only=False)


def _work(
    rank: int, world: int, kind: str, folder: Path, function: Callable[..., Any], arguments: Any
) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        device_id=device if kind == "cuda" else None,
    )
    try:
        result = function(device, *arguments)
        if rank == 0:
            torch.save(result, folder / "result")
    finally:
        dist.destroy_process_group()
