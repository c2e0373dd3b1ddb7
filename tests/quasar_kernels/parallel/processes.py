"""Runs a function in several processes of one gloo group and returns their results."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import wait_for

_CONTEXT = multiprocessing.get_context("forkserver")
# imported once, by the process from which ranks are forked
_CONTEXT.set_forkserver_preload(
    [f"tests.quasar_kernels.parallel.{n}" for n in ("slices", "layers")]
)


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of `function(rank, *args)` in `world` processes of one gloo group."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save((function, args), folder / "call.pt")
        ranks = start_ranks(folder, world)
        wait_for(lambda: [r for r in ranks if r.exitcode] or all(r.exitcode == 0 for r in ranks))
        for rank in ranks:
            rank.kill()
        logs = [path.read_text() for path in sorted(folder.glob("*.log"))]
        assert all(rank.exitcode == 0 for rank in ranks), logs
        return [result_of(folder, rank) for rank in range(world)]


def result_of(folder: Path, rank: int) -> Any:
    """Return the result of a rank's call."""
    return torch.load(folder / f"{rank}.pt", weights_only=False)


def start_ranks(folder: Path, world: int) -> list[Any]:
    """Start the ranks of the call in the folder's call.pt; each writes its result or its error."""
    ranks = [
        _CONTEXT.Process(target=_run, args=(folder, rank, world), daemon=True)
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def _run(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        function, args = torch.load(folder / "call.pt", weights_only=False)
        torch.save(function(rank, *args), folder / f"{rank}.pt")
    except BaseException as error:
        (folder / f"{rank}.log").write_text(repr(error))
        raise
    (folder / f"{rank}.done").touch()  # a rank that ends closes its connections, so all wait
    wait_for(lambda: all((folder / f"{n}.done").exists() for n in range(world)))
