"""Layers as validators time them, how they are called, and what may become of their parameters."""

from __future__ import annotations

import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer import replay


def make_layer(**options):
    """A layer of the usual size but for the options; its weights are the same each time."""
    torch.manual_seed(0)
    usual = {"hidden_size": 512, "num_heads": 8, "head_dim": 64}
    return QuasarAttention(**(usual | options)).cuda()


def call(layer, x, dtype=torch.bfloat16):
    """The layer's output under autocast."""
    with torch.autocast("cuda", dtype):
        return layer(x)[0]


def graphs(layer):
    """The layer's CUDA graphs."""
    return [g for g in replay._owners.get(layer, {}).values() if isinstance(g, replay._Graph)]


def backward_graphs(layer):
    """Those of backward passes, which alone have several outputs."""
    return [g for g in graphs(layer) if len(g.outputs) > 1]


def swapped(layer):
    """The layer with new parameters in the place of some."""
    for module in (layer.q_proj, layer.o_proj):
        module.weight = torch.nn.Parameter(torch.randn_like(module.weight) * 0.1)
    return layer


def moved(layer):
    """The layer after it was changed on the CPU."""
    layer.cpu()
    with torch.no_grad():
        layer.q_proj.weight.mul_(-2)
    return layer.cuda()
