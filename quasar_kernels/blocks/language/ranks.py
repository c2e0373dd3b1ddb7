"""Training by several processes: sequence and data parallelism.

The ranks form a grid. The ranks of a row process slices of the same sequences; each row has other
sequences. Parameters and optimizer are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from quasar_kernels.mount import mount

mount()

from fla.ops.quasar.parallel.context import build_cp_context  # noqa: E402

TIMEOUT = timedelta(minutes=5)
"""Longest wait for another rank. If a rank fails, torchrun ends the others within seconds."""


class Ranks:
    """This process's place among those that torchrun started.

    Args:
        sequence: number of processes that share sequences.
        data: number of such groups, each with different sequences.
        device: the model's device.

    Raises:
        ValueError: torchrun did not start `sequence * data` processes.
    """

    def __init__(self, sequence: int, data: int, device: torch.device) -> None:
        if not dist.is_torchelastic_launched():
            raise ValueError(
                "--sequence-ranks and --data-ranks need several processes: start the command by "
                f"torchrun --nproc_per_node {sequence * data} -m quasar_kernels.blocks.language"
            )
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        if dist.get_world_size() != sequence * data:
            raise ValueError(
                f"torchrun started {dist.get_world_size()} processes, but --sequence-ranks times "
                f"--data-ranks is {sequence * data}: make both equal"
            )
        mesh = init_device_mesh(device.type, (data, sequence), mesh_dim_names=("data", "sequence"))
        self._group = mesh["sequence"].get_group()
        self._place, self._data, self._device = mesh["data"].get_local_rank(), data, device
        self.first = dist.get_rank() == 0
        """Whether this process writes the files and the output."""

    def slice_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return this rank's inputs and targets `[1, n]` and their context.

        Args:
            tokens: the step's sequences `[batch, T + 1]`, the same on every rank.

        Raises:
            ValueError: there are fewer sequences than groups.
        """
        rows = tokens[self._place :: self._data]
        if not len(rows):
            raise ValueError(
                f"--batch {len(tokens)} is too small for --data-ranks {self._data}: raise it"
            )
        inputs, targets = rows[:, :-1].flatten(), rows[:, 1:].flatten()
        bounds = torch.arange(len(rows) + 1) * (tokens.shape[1] - 1)
        context = build_cp_context(bounds.to(self._device), self._group, None, bounds)
        begin = sum(context.lengths[: dist.get_rank(self._group)])
        at = slice(begin, begin + int(context.cu_seqlens_cpu[-1]))
        return inputs[None, at], targets[None, at], context

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return this rank's share of the mean loss of a step's sequences `[batch, T + 1]`."""
        inputs, targets, context = self.slice_of(tokens)
        logits = model(inputs, cp_context=context)
        total = F.cross_entropy(logits[0].float(), targets[0], reduction="sum")
        return total / tokens[:, 1:].numel()

    def sum(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Sum the gradients over all ranks, by one exchange; return the summed loss."""
        grads = [p.grad for p in parameters if p.grad is not None]
        together = torch.cat([loss.detach().view(1), *(grad.flatten() for grad in grads)])
        dist.all_reduce(together)
        summed, *parts = together.split([1, *(grad.numel() for grad in grads)])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
        return summed[0]

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank."""
        flag = torch.tensor([float(condition)], device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
