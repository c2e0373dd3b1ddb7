"""Training a language model on a text of bytes, step by step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quasar_kernels.blocks.language.checkpoint import (
    Checkpoint,
    CheckpointError,
    load,
    model_of,
    save,
)
from quasar_kernels.blocks.language.model import LanguageModel, next_token_loss
from quasar_kernels.blocks.language.ranks import Ranks
from quasar_kernels.blocks.language.recorded import RecordedStep
from quasar_kernels.blocks.language.settings import Recipe, Sizes


class TextError(ValueError):
    """A text is too short for the sequences that are drawn from it."""


def read_text(path: Path, tokens: int) -> tuple[Tensor, str]:
    """Return a file's bytes as tokens `[bytes]` uint8, and their digest.

    Raises:
        TextError: the file has fewer than `tokens` + 1 bytes.
        OSError: the file cannot be read.
    """
    content = path.read_bytes()
    if len(content) <= tokens:
        raise TextError(
            f"{path} has {len(content)} bytes, but a sequence needs {tokens + 1}; use a longer "
            "text or a smaller --tokens"
        )
    text = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
    return text, hashlib.sha256(content).hexdigest()


def draw(text: Tensor, recipe: Recipe, step: int) -> Tensor:
    """Return a step's sequences `[batch, tokens + 1]` int64; seed and step determine them."""
    # unlike torch's CPU generator, which uses 32 bits, numpy's accepts both numbers as a seed
    random = np.random.default_rng((recipe.seed % (1 << 64), step))
    starts = torch.from_numpy(random.integers(len(text) - recipe.tokens, size=recipe.batch))
    return text[starts[:, None] + torch.arange(recipe.tokens + 1)].long()


class Training:
    """A model, its optimizer and its losses; resumes from the checkpoint if there is one.

    Args:
        text: `[bytes]` uint8, as `read_text` returns it with its digest.
        path: the checkpoint's file.
        ranks: the processes that train together; None for a single process.

    Raises:
        CheckpointError: the checkpoint is unreadable, or of another text, model or recipe.
    """

    def __init__(
        self,
        text: Tensor,
        digest: str,
        path: Path,
        sizes: Sizes,
        recipe: Recipe,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self.sizes, self.recipe, self.losses = sizes, recipe, list[float]()
        self._text, self._digest, self._path, self._device = text, digest, path, device
        checkpoint = load(path, device) if path.exists() else None
        if checkpoint is None:
            torch.manual_seed(recipe.seed)
            self.model = LanguageModel(sizes).to(device)
        else:
            self._check_same_training(checkpoint)
            self.model, self.losses = model_of(checkpoint, device), checkpoint.losses
        on_gpu = device.type == "cuda"
        self._rate = torch.tensor(recipe.rate, device=device) if on_gpu else recipe.rate
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self._rate,
            weight_decay=recipe.weight_decay,
            fused=on_gpu,
            capturable=on_gpu,
        )
        if checkpoint is not None:
            self._optimizer.load_state_dict(checkpoint.optimizer)
        # with several processes, a step waits for other ranks, which a graph cannot contain
        self._step = RecordedStep(self._train_on, device) if ranks is None else self._train_on

    def _check_same_training(self, checkpoint: Checkpoint) -> None:
        mine = (("model", self.sizes), ("recipe", self.recipe), ("text", self._digest))
        its = (checkpoint.sizes, checkpoint.recipe, checkpoint.digest)
        other = [name for (name, x), y in zip(mine, its, strict=True) if x != y]
        if other:
            raise CheckpointError(
                f"{self._path} has another {' and '.join(other)}: repeat the options of its "
                "training, or name another folder with --out"
            )

    def step(self) -> float:
        """Do one step and return its loss in nats per token."""
        place, recipe = len(self.losses), self.recipe
        rate = recipe.rate * min(1, (place + 1) / recipe.warmup)
        for group in self._optimizer.param_groups:
            if isinstance(self._rate, Tensor):
                group["lr"] = self._rate.fill_(rate)  # a replayed step reads it in place
            else:
                group["lr"] = rate
        tokens = draw(self._text, recipe, place).to(self._device)
        self.losses.append(self._step(tokens).item())
        return self.losses[-1]

    def _train_on(self, tokens: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, self._device.type == "cuda"):
            if self._ranks is None:
                loss = next_token_loss(self.model(tokens), tokens)
            else:
                loss = self._ranks.loss(self.model, tokens)
        loss.backward()
        if self._ranks is not None:
            loss = self._ranks.sum(loss, self.model.parameters())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self._optimizer.step()
        return loss.detach()

    def save(self) -> None:
        """Write the checkpoint, on the first rank only."""
        if self._ranks is not None and not self._ranks.first:
            return
        weights, optimizer = self.model.state_dict(), self._optimizer.state_dict()
        save(
            self._path,
            Checkpoint(self.sizes, self.recipe, self._digest, self.losses, weights, optimizer),
        )

    def run(
        self,
        steps: int,
        save_seconds: float,
        report: Callable[[int, float], None],
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> bool:
        """Train until `steps` steps are done in total; save periodically and at the end.

        Args:
            save_seconds: least seconds between two checkpoints, and before the first one.
            report: called after each step with the number of steps and the step's loss.
            stopped: called before each step; the training ends if it returns true on any rank.
            clock: returns seconds.

        Returns:
            Whether all steps are done.

        Raises:
            FloatingPointError: the loss is not finite; the last checkpoint stays.
        """
        saved_at, unsaved = clock(), False
        while len(self.losses) < steps:
            stop = stopped()
            if self._ranks is not None:
                stop = self._ranks.any(stop)
            if stop:
                break
            loss = self.step()
            if not np.isfinite(loss):
                raise FloatingPointError(
                    f"the loss is {loss} at step {len(self.losses)}; start again in another "
                    "folder with a smaller --rate"
                )
            unsaved = True
            if clock() - saved_at >= save_seconds:
                self.save()
                saved_at, unsaved = clock(), False
            report(len(self.losses), loss)
        if unsaved:
            self.save()
        return len(self.losses) >= steps
