"""An honest QuasarAttention, which the cheats of this folder are made of: by chunks, for speed.

The modules here are copied into a tree of a fork; `right` stays the honest operator there, and
`chunk_quasar` is what the layer calls.
"""

import torch
import torch.nn.functional as F
from torch import nn

CHUNK = 64


def right(q, k, v, beta, initial_state=None, output_final_state=False, **_unused):
    batch, length, heads, size = q.shape
    shape = (batch, heads, size, size)
    state = q.new_zeros(shape).float() if initial_state is None else initial_state.float()
    q_, k_, v_ = (x.float().transpose(1, 2) for x in (q, k, v))
    square = k_.square().sum(-1)
    alpha = -torch.expm1(-beta[:, None] * square) / (square + 1e-8)
    out = []
    for start in range(0, length, CHUNK):
        qc, kc, vc = (x[:, :, start : start + CHUNK] for x in (q_, k_, v_))
        a = alpha[:, :, start : start + CHUNK, None]
        mixing = (a * kc @ kc.mT).tril(-1) + torch.eye(kc.shape[2], device=q.device)
        new = torch.linalg.solve_triangular(mixing, a * (vc - kc @ state), upper=False)
        out.append(qc @ state + (qc @ kc.mT).tril() @ new)
        state = state + kc.mT @ new
    o = torch.cat(out, 2).transpose(1, 2).to(q.dtype)
    return o, state if output_final_state else None


chunk_quasar = right


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
