"""Calls a function in a process group of torch.distributed, with one process for each GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def in_group(world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function(device, *arguments)` in `world` processes over NCCL; return rank 0's result.

    New processes import the function, so it must be picklable, as must its arguments. If one
    process fails, its error is raised and the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (world, Path(folder), function, arguments), world)
        return torch.load(Path(folder) / "result", weights_only=False)


def _work(
    rank: int, world: int, folder: Path, function: Callable[..., Any], arguments: Any
) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "nccl", init_method=meeting, rank=rank, world_size=world, device_id=device
    )
    try:
        result = function(device, *arguments)
        if rank == 0:
            torch.save(result, folder / "result")
    finally:
        dist.destroy_process_group()
