"""Small models for the checks: a sound one, and one with each fault that the checks find."""

import torch
import torch.nn.functional as F
from torch import nn

from quasar_kernels.blocks.language import LanguageModel, Sizes

VOCABULARY = 32


class Plain(nn.Module):
    """Predicts from the three latest tokens; causal."""

    vocabulary = VOCABULARY

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.convolution = nn.Conv1d(32, 64, 3)
        self.output = nn.Linear(64, VOCABULARY)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def mixed(self, x):
        return self.convolution(F.pad(x.mT, (2, 0))).mT

    def forward(self, tokens):
        return self.output(F.relu(self.mixed(self.embedding(tokens))))


class Leaking(Plain):
    """Adds a small share of the mean over the whole sequence."""

    def mixed(self, x):
        return super().mixed(x) + 1e-2 * x.mean(1, keepdim=True).repeat(1, 1, 2)


class Confident(Plain):
    """Has a low initial entropy."""

    def __init__(self):
        super().__init__()
        self.output.weight.data *= 40


class NaN(Plain):
    """Returns NaN for one logit."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return torch.where(torch.arange(VOCABULARY) == 3, float("nan"), logits)


class NaNLater(Plain):
    """Returns NaN as soon as its weights have changed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", self.output.weight.detach().clone())

    def forward(self, tokens):
        moved = (self.output.weight - self.get_buffer("first")).abs().max()
        return super().forward(tokens) + torch.where(moved > 0.01, float("nan"), 0.0)


class Unused(Plain):
    """Has a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


class Memoryless(Plain):
    """Uses only the current token, so it cannot learn the task."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.output(F.relu(torch.cat([x, x], -1)))


class Broken(Plain):
    """Raises an exception."""

    def forward(self, tokens):
        raise RuntimeError("no such kernel")


def hybrid():
    """A block of two branches."""
    return LanguageModel(Sizes(VOCABULARY, 32, 2, 1, ("mamba2", "quasar"), state=16))


def dead():
    """A block whose second branch never contributes."""
    model = hybrid()
    model.blocks[0].mixers["quasar"].layer.o_proj.weight.data.zero_()
    model.blocks[0].fusion.gains.data[1] = 0
    return model


def without_vocabulary():
    """A module without the attribute `vocabulary`."""
    return nn.Linear(2, 2)
