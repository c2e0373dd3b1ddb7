"""A small, honest, slow QuasarAttention on torch alone: the content of the fake trees.

It is independent of the project's reference: it computes one token at a time, in fp32.
"""

import torch
import torch.nn.functional as F
from torch import nn


def chunk_quasar(
    q, k, v, beta, initial_state=None, output_final_state=False, cu_seqlens=None, **_unused
):
    batch, length, heads, size = q.shape
    qs, ks, vs = (x.float().permute(1, 0, 2, 3).reshape(length, -1, 1, size) for x in (q, k, v))
    square = (ks * ks).sum(-1, keepdim=True)  # [T, B H, 1, 1]
    alpha = -torch.expm1(-beta.repeat(batch)[:, None, None] * square) / (square + 1e-8)
    keys = (alpha * ks).transpose(-1, -2)
    shape = (batch, heads, size, size)
    state = (q.new_zeros(shape) if initial_state is None else initial_state).float().flatten(0, 1)
    outputs = []
    for t in range(length):
        state = torch.baddbmm(state, keys[t], vs[t] - ks[t] @ state)
        outputs.append(qs[t] @ state)
    o = torch.stack(outputs).view(length, batch, heads, size).transpose(0, 1).to(q.dtype)
    return o, state.view(shape) if output_final_state else None


class QuasarAttention(nn.Module):
    def __init__(self, hidden_size, head_dim, num_heads, mode="chunk", use_short_conv=True):
        super().__init__()
        self.head_dim, self.num_heads = head_dim, num_heads
        width = head_dim * num_heads
        for name in "qkv":
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, width, bias=False))
            conv = nn.Conv1d(width, width, 4, groups=width, padding=3, bias=False)
            setattr(self, f"{name}_conv1d", conv)
        self.beta_log = nn.Parameter(torch.log(torch.empty(num_heads).uniform_(1, 16)))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, head_dim, bias=False), nn.Linear(head_dim, width)
        )
        self.o_norm = nn.RMSNorm(head_dim, eps=1e-5)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def mixed(self, x, name):
        y = getattr(self, f"{name}_proj")(x)
        y = getattr(self, f"{name}_conv1d")(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return F.silu(y).unflatten(-1, (self.num_heads, self.head_dim))

    def forward(self, x, **_unused):
        q, k, v = (self.mixed(x, name) for name in "qkv")
        o, _ = chunk_quasar(q, k, v, F.softplus(self.beta_log))
        o = self.o_norm(o).flatten(-2) * torch.sigmoid(self.g_proj(x))
        return self.o_proj(o), None, None
