"""Atomic checkpoints; a resumed training gives the same bits as an uninterrupted one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quasar_kernels.blocks.language.model import LanguageModel
from quasar_kernels.blocks.language.settings import Recipe, Sizes


class Checkpoint(NamedTuple):
    """A training after some steps."""

    sizes: Sizes
    recipe: Recipe
    digest: str  # SHA-256 of the training text
    losses: list[float]  # of each step, nats per token
    model: dict[str, Tensor]
    optimizer: dict[str, object]


class CheckpointError(Exception):
    """A checkpoint is unreadable or belongs to another training; the message names a remedy."""


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: after an interruption, the file is the old or the new one."""
    content = checkpoint._asdict()
    content["sizes"], content["recipe"] = (tuple(x) for x in (checkpoint.sizes, checkpoint.recipe))
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path, device: torch.device) -> Checkpoint:
    """Read a checkpoint; only tensors and plain values are taken from the file.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        content["sizes"] = Sizes(*content["sizes"])
        content["recipe"] = Recipe(*content["recipe"])
        return Checkpoint(**content)
    except FileNotFoundError:
        raise CheckpointError(f"there is no {path}; `train --out` writes it") from None
    except Exception as error:  # a damaged file may raise any exception
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}); remove it to start over, or name "
            "another folder"
        ) from error


def model_of(checkpoint: Checkpoint, device: torch.device) -> LanguageModel:
    """Return the model with a checkpoint's parameters."""
    model = LanguageModel(checkpoint.sizes).to(device)
    model.load_state_dict(checkpoint.model)
    return model
