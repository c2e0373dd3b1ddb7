"""A model of the public fork's layer, which a validator times with FORK_SCOPE=ops.

It has the same parameters and calls `chunk_quasar` in the same way: by keyword, on outputs of
modules under autocast, with the cache's states. Its convolution and norm are torch modules instead
of Triton modules.
"""

import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.ops.quasar import chunk_quasar, fused_recurrent_quasar  # noqa: F401
from fla.ops.quasar.gate import fused_quasar_gate  # noqa: F401


class ShortConvolution(nn.Conv1d):
    def __init__(self, hidden_size, kernel_size):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)

    def forward(self, x, cache=None, output_final_state=False, cu_seqlens=None):
        W = self.kernel_size[0]
        if cu_seqlens is not None:
            bounds = itertools.pairwise(cu_seqlens.tolist())
            parts = [self(x[:, a:b])[0] for a, b in bounds]
            return torch.cat(parts, dim=1), None
        before = x.new_zeros(x.shape[0], x.shape[2], W) if cache is None else cache
        padded = torch.cat([before, x.mT], dim=-1)
        y = F.silu(F.conv1d(padded[..., 1:], self.weight.to(x.dtype), groups=self.groups)).mT
        return y, padded[..., -W:] if output_final_state else None


class GatedNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x, gate):
        y = F.rms_norm(x.float(), x.shape[-1:], self.weight, 1e-5) * torch.sigmoid(gate.float())
        return y.to(x.dtype)


class QuasarAttention(nn.Module):
    def __init__(self, hidden_size=2048, head_dim=128, num_heads=16, layer_idx=None, **kwargs):
        super().__init__()
        width = num_heads * head_dim
        self.head_dim, self.layer_idx = head_dim, layer_idx
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.q_conv1d = ShortConvolution(width, 4)
        self.k_conv1d = ShortConvolution(width, 4)
        self.v_conv1d = ShortConvolution(width, 4)
        self.beta_log = nn.Parameter(torch.log(torch.empty(num_heads).uniform_(1, 16)))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, head_dim, bias=False), nn.Linear(head_dim, width, bias=True)
        )
        self.o_norm = GatedNorm(head_dim)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, hidden_states, past_key_values=None, use_cache=False, **kwargs):
        cu_seqlens = kwargs.get("cu_seqlens")
        last = None
        if past_key_values is not None and len(past_key_values) > self.layer_idx:
            last = past_key_values[self.layer_idx]
        states = (None,) * 3 if last is None else last["conv_state"]
        outputs = [
            conv(proj(hidden_states), state, use_cache, cu_seqlens)
            for proj, conv, state in zip(
                (self.q_proj, self.k_proj, self.v_proj),
                (self.q_conv1d, self.k_conv1d, self.v_conv1d),
                states,
                strict=True,
            )
        ]
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y, _ in outputs)
        beta = F.softplus(self.beta_log)
        o, state = chunk_quasar(
            q=q,
            k=k,
            v=v,
            beta=beta,
            initial_state=None if last is None else last["recurrent_state"],
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
        )
        if past_key_values is not None:
            past_key_values.update(
                recurrent_state=state,
                conv_state=tuple(s for _, s in outputs),
                layer_idx=self.layer_idx,
                offset=hidden_states.shape[1],
            )
        o = self.o_norm(o, self.g_proj(hidden_states).unflatten(-1, (-1, self.head_dim)))
        return self.o_proj(o.flatten(-2)), None, past_key_values
