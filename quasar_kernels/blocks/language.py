"""Example: a language model of hybrid blocks over bytes, its training on a text, and sampling.

python -m quasar_kernels.blocks.language train --text FILE --out FOLDER
python -m quasar_kernels.blocks.language sample --model FOLDER --prompt "Once"
torchrun --nproc_per_node N -m quasar_kernels.blocks.language train ...  # N ranks share a step
"""

from __future__ import annotations

from quasar_kernels import interrupts

if __name__ == "__main__":
    interrupts.exit_on_ctrl_c()  # during the imports below

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fla.ops.quasar.parallel.context import build_cp_context
from torch import Tensor, nn

from quasar_kernels.arguments import Parser, positive
from quasar_kernels.blocks import MIXERS, BlockState, HybridBlock
from quasar_kernels.blocks.recorded import RecordedStep

CHECKPOINT = "model.pt"
SECONDS = 10
"""Seconds between two printed losses; each time, a checkpoint is saved."""
OPTIONS = ("width", "heads", "layers", "state", "fusion", "tokens", "batch", "rate", "seed")


class Sizes(NamedTuple):
    """A model's sizes; the names are those of `HybridBlock`'s arguments."""

    vocabulary: int = 256
    width: int = 128
    heads: int = 4
    layers: int = 4
    mixers: tuple[str, ...] = MIXERS
    fusion: str = "gains"
    state: int = 64
    checkpoint_above: int | None = None
    inner: int | None = None


class Recipe(NamedTuple):
    """The settings of a training; they determine each step's batch and learning rate."""

    tokens: int = 256  # of a sequence
    batch: int = 8  # sequences
    rate: float = 2e-3
    warmup: int = 50  # steps over which the rate rises
    weight_decay: float = 0.01
    clip: float = 1.0  # the gradient's largest norm
    seed: int = 0


class LanguageModel(nn.Module):
    """Predicts the next token; input and output share an embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.vocabulary = sizes.vocabulary
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        options = {name: x for name, x in sizes._asdict().items() if name != "vocabulary"}
        self.blocks = nn.ModuleList(HybridBlock(layer=n, **options) for n in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, cp_context: Any = None) -> Tensor:
        """Return logits `[B, T, vocabulary]` after tokens `[B, T]`."""
        return self._run(tokens, None, False, cp_context)[0]

    def continued(
        self, tokens: Tensor, states: list[BlockState] | None = None, cp_context: Any = None
    ) -> tuple[Tensor, list[BlockState]]:
        """Return logits and new states; with a `cp_context`, of this rank's slice (B = 1)."""
        return self._run(tokens, states, True, cp_context)

    def _run(self, tokens: Tensor, states: Any, keep: bool, cp_context: Any) -> tuple[Tensor, Any]:
        x, new_states = self.embedding(tokens), []
        for n, block in enumerate(self.blocks):
            x, state = block(x, states and states[n], keep=keep, cp_context=cp_context)
            new_states.append(state)
        return F.linear(self.norm(x), self.embedding.weight), new_states


class Training:
    """A model, its optimizer and its losses in nats per byte; a group's ranks share each step."""

    def __init__(self, text: bytes, sizes: Sizes, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self._device = recipe, device
        if len(text) <= recipe.tokens:
            raise ValueError(f"the text has {len(text)} bytes, but --tokens is {recipe.tokens}")
        digest = hashlib.sha256(text).hexdigest()
        self._of = {"sizes": tuple(sizes), "recipe": tuple(recipe), "digest": digest}
        self._text = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
        self.losses: list[float] = []
        torch.manual_seed(recipe.seed)
        self.model = LanguageModel(sizes).to(device)
        # in a tensor, because a replayed step reads the rate in place
        self._rate, gpu = torch.tensor(recipe.rate, device=device), device.type == "cuda"
        options: dict[str, Any] = {"weight_decay": recipe.weight_decay, "fused": gpu}
        weights = self.model.parameters()
        self._optimizer = torch.optim.AdamW(weights, self._rate, capturable=gpu, **options)
        # a step of several processes waits for other ranks, which a graph cannot contain
        alone = not dist.is_initialized()
        self._step = RecordedStep(self._train_on, device) if alone else self._train_on

    def step(self) -> float:
        """Do one step and return its loss."""
        place, recipe = len(self.losses), self.recipe
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate.fill_(recipe.rate * min(1, (place + 1) / recipe.warmup))
        self.losses.append(self._step(self.draw(place).to(self._device)).item())
        return self.losses[-1]

    def draw(self, step: int) -> Tensor:
        """Return a step's sequences `[batch, tokens + 1]`; seed and step determine them."""
        random, tokens = np.random.default_rng((self.recipe.seed % 2**64, step)), self.recipe.tokens
        starts = random.integers(len(self._text) - tokens, size=(self.recipe.batch, 1))
        return self._text[torch.from_numpy(starts) + torch.arange(tokens + 1)].long()

    def _train_on(self, tokens: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, self._device.type == "cuda"):
            loss = self._loss(tokens)
        loss.backward()
        loss = loss.detach()
        if dist.is_initialized():
            for part in (loss, *(p.grad for p in self.model.parameters() if p.grad is not None)):
                dist.all_reduce(part)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self._optimizer.step()
        return loss

    def _loss(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of sequences, or this rank's share of it."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        if not dist.is_initialized():
            return F.cross_entropy(self.model(inputs).flatten(0, 1).float(), targets)
        bounds = torch.arange(len(tokens) + 1) * inputs.shape[1]
        context = build_cp_context(bounds.to(self._device), dist.group.WORLD, None, bounds)
        begin = sum(context.lengths[: dist.get_rank()])
        mine = slice(begin, begin + context.lengths[dist.get_rank()])
        logits = self.model(inputs.flatten()[None, mine], cp_context=context)[0].float()
        return F.cross_entropy(logits, targets[mine], reduction="sum") / len(targets)

    def save(self, path: Path) -> None:
        """Write a checkpoint; after an interruption, the file is the old or the new one."""
        states = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save({**self._of, "losses": self.losses, **states}, partial := f"{path}.partial")
        Path(partial).replace(path)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint, on a CPU with the bits of an uninterrupted training."""
        kept = torch.load(path, map_location=self._device, weights_only=True)
        if other := [name for name, value in self._of.items() if kept[name] != value]:
            raise ValueError(f"{path} differs in {', '.join(other)}: choose another --out")
        self.losses = kept["losses"]
        self.model.load_state_dict(kept["model"])
        self._optimizer.load_state_dict(kept["optimizer"])


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m quasar_kernels.blocks.language")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train on a file, or resume from the checkpoint")
    train.add_argument("--text", type=Path, required=True, help="any file; its bytes are tokens")
    train.add_argument("--steps", type=positive, default=1000, help="in all (1000)")
    train.add_argument("--mixers", type=lambda x: tuple(x.split("+")), default=MIXERS,
                       help=f"branches joined by + ({'+'.join(MIXERS)})")  # fmt: skip
    train.add_argument("--checkpoint-above", type=positive, help="recompute blocks above a length")
    for name in OPTIONS:
        default = {**Sizes._field_defaults, **Recipe._field_defaults}[name]
        train.add_argument(f"--{name}", type=type(default), default=default, help=f"({default})")
    sample = commands.add_parser("sample", help="draw a text from a trained model")
    sample.add_argument("--prompt", default="\n", help="beginning of the text")
    sample.add_argument("--count", type=positive, default=400, help="number of bytes (400)")
    sample.add_argument("--temperature", type=float, default=0.8, help="above 0 (0.8)")
    sample.add_argument("--seed", type=int, default=0, help="(0)")
    for command, name in ((train, "--out"), (sample, "--model")):
        command.add_argument(name, dest="folder", type=Path, default=Path("model"), help="(model)")
        command.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU, if any")
    return parser


def _train(given: argparse.Namespace, device: torch.device) -> None:
    if "WORLD_SIZE" in os.environ:  # torchrun sets it
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    sizes = Sizes(**{n: value for n, value in vars(given).items() if n in Sizes._fields})
    recipe = Recipe(**{n: value for n, value in vars(given).items() if n in Recipe._fields})
    training = Training(given.text.read_bytes(), sizes, recipe, device)
    path, first = given.folder / CHECKPOINT, not dist.is_initialized() or dist.get_rank() == 0
    given.folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        training.resume(path)
    began, reported = len(training.losses), time.monotonic()
    while (done := len(training.losses)) < given.steps:
        loss, now = training.step(), time.monotonic()
        if not np.isfinite(loss):
            raise ValueError(f"the loss is {loss} at step {done + 1}: try a smaller --rate")
        if first and (now - reported >= SECONDS or done in (began, given.steps - 1)):
            print(f"step {done + 1:,} of {given.steps:,}: loss {loss:.3f}", flush=True)
            training.save(path)
            reported = now


@torch.no_grad()
def _sample(given: argparse.Namespace, device: torch.device) -> None:
    kept = torch.load(given.folder / CHECKPOINT, map_location=device, weights_only=True)
    model = LanguageModel(Sizes(*kept["sizes"])).to(device)
    model.load_state_dict(kept["model"])
    random = torch.Generator(device).manual_seed(given.seed)
    text, states = torch.tensor([list(given.prompt.encode())], device=device), None
    for n in range(given.count):
        logits, states = model.continued(text if n == 0 else text[:, -1:], states)
        chances = (logits[:, -1].float() / given.temperature).softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=random)], 1)
    print(bytes(text[0].tolist()).decode(errors="replace"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, or 1 for an error."""
    given = _parser().parse_args(argv)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        {"train": _train, "sample": _sample}[given.command](given, device)
    except (OSError, ValueError, RuntimeError) as error:  # a damaged checkpoint: RuntimeError
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    interrupts.run(main)
