"""Layers of the size that validators time, their CUDA graphs, and changes of their parameters."""

import torch
from fla.layers.quasar import QuasarAttention
from fla.ops.quasar.layer.graphs import _Graph, _owners


def make_layer(**options):
    """Return a layer, by default of a validator's size; its weights are always the same."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "num_heads": 8, "head_dim": 64}
    return QuasarAttention(**(sizes | options)).cuda()


def call(layer, x, dtype=torch.bfloat16, **options):
    """Return the layer's output under autocast."""
    with torch.autocast("cuda", dtype):
        return layer(x, **options)[0]


def graphs(layer):
    """Return the layer's CUDA graphs."""
    return [g for g in _owners.get(layer, {}).values() if isinstance(g, _Graph)]


def backward_graphs(layer):
    """Return the CUDA graphs of backward passes; only these have several outputs."""
    return [g for g in graphs(layer) if len(g.outputs) > 1]


def swapped(layer):
    """Replace some parameters of the layer."""
    for module in (layer.q_proj, layer.o_proj):
        module.weight = torch.nn.Parameter(torch.randn_like(module.weight) * 0.1)
    return layer


def moved(layer):
    """Move the layer to the CPU, change it there, and move it back."""
    layer.cpu()
    with torch.no_grad():
        layer.q_proj.weight.mul_(-2)
    return layer.cuda()
