"""The compared models, their sizes with equal numbers of parameters, and parallel trainings."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

from quasar_kernels.blocks import MIXERS
from quasar_kernels.blocks.language.model import LanguageModel, Sizes

CHOICES = (
    *((name,) for name in MIXERS),
    ("rwkv6", "mamba2"),
    ("rwkv6", "quasar"),
    ("mamba2", "quasar"),
    MIXERS,
)
"""The branches of each model's blocks."""

AT_ONCE = 8
"""Trainings that share a GPU, because small models leave it idle between launches."""

Found = TypeVar("Found")


def equal_sizes(mixers: Sequence[str], like: Sizes) -> Sizes:
    """Return the sizes of a model with these branches and about as many parameters as all others.

    The MLP's inner width is chosen so that the model has the number of parameters of `like` with
    all branches and an MLP as wide as the model.
    """
    of_all = like._replace(mixers=MIXERS, inner=like.width)
    least = of_all._replace(mixers=tuple(mixers), inner=1)
    a_unit = parameters(least._replace(inner=2)) - parameters(least)
    more = (parameters(of_all) - parameters(least)) / a_unit
    return least._replace(inner=1 + round(more))


def parameters(sizes: Sizes) -> int:
    """Return a model's number of parameters, without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in LanguageModel(sizes).parameters())


def side_by_side(
    train: Callable[[tuple[str, ...], int], Found], seeds: int, on_gpu: bool
) -> Iterator[Found]:
    """Yield the results of `train(mixers, seed)` for each choice and seed, in order of completion.

    Args:
        train: a function that can be pickled; it runs in separate processes, several on one GPU.
    """
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    workers = min(AT_ONCE, max(1, cores // 2)) if on_gpu else cores
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        jobs = [pool.submit(train, mixers, seed) for seed in range(seeds) for mixers in CHOICES]
        for job in as_completed(jobs):
            yield job.result()
