"""A model of the public fork's layer, which a validator times with FORK_SCOPE=ops.

It has the same parameters and calls `chunk_quasar` in the same way: by keyword, on outputs of
modules under autocast. Its convolution and norm are torch modules instead of Triton modules.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar  # noqa: F401
from fla.ops.quasar.gate import fused_quasar_gate  # noqa: F401


class ShortConvolution(nn.Conv1d):
    def __init__(self, hidden_size, kernel_size):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)

    def forward(self, x):
        padded = F.pad(x.mT, (self.kernel_size[0] - 1, 0))
        return F.silu(F.conv1d(padded, self.weight.to(x.dtype), groups=self.groups)).mT


class GatedNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x, gate):
        y = F.rms_norm(x.float(), x.shape[-1:], self.weight, 1e-5) * torch.sigmoid(gate.float())
        return y.to(x.dtype)


class QuasarAttention(nn.Module):
    def __init__(self, hidden_size=2048, head_dim=128, num_heads=16, **kwargs):
        super().__init__()
        width = num_heads * head_dim
        self.head_dim = head_dim
        for name in "qkv":
            self.add_module(f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
            self.add_module(f"{name}_conv1d", ShortConvolution(width, 4))
        self.beta_log = nn.Parameter(torch.log(torch.empty(num_heads).uniform_(1, 16)))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, head_dim, bias=False), nn.Linear(head_dim, width, bias=True)
        )
        self.o_norm = GatedNorm(head_dim)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, hidden_states, **kwargs):
        heads = -1, self.head_dim
        qkv = {}
        for name in "qkv":
            projected = self.get_submodule(f"{name}_proj")(hidden_states)
            qkv[name] = self.get_submodule(f"{name}_conv1d")(projected).unflatten(-1, heads)
        gate = self.g_proj(hidden_states).unflatten(-1, heads)
        rest = {"initial_state": None, "output_final_state": False, "cu_seqlens": None}
        o, _ = chunk_quasar(**qkv, beta=F.softplus(self.beta_log), **rest)
        return self.o_proj(self.o_norm(o, gate).flatten(-2)), None, None
