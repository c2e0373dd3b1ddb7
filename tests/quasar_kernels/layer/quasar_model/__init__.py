"""A small language model of the public Quasar models' shape, with the names that its users need.

Blocks of four Quasar and two GLA layers; RoPE, norms before and after each half, a dense MLP in the
first `dense_input_layers` and experts beyond. Experts are computed for all tokens and weighted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from fla.layers.quasar import QuasarAttention
from torch import Tensor, nn

DEFAULTS = {
    "n_layers": 6,
    "d_ff": 64,
    "quasar_layers": 4,
    "gated_layers": 2,
    "dense_input_layers": 4,
    "num_routed_experts": 4,
    "top_k": 2,
    "routed_expert_size": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "residual_scale": 0.1,
}


class QuasarConfig(SimpleNamespace):
    """A model's sizes: `DEFAULTS`, `vocab_size`, `d_model`, `n_heads` and `head_dim`."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{**DEFAULTS, **sizes})

    def kind(self, index: int) -> str:
        """Return whether a layer is a `quasar` or a `gla` layer."""
        place = index % (self.quasar_layers + self.gated_layers)
        return "quasar" if place < self.quasar_layers else "gla"


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """A shared MLP, and the `top_k` of several MLPs that a router selects for a token."""

    def __init__(self, config: QuasarConfig) -> None:
        super().__init__()
        width, inner = config.d_model, config.routed_expert_size
        self.shared = MLP(width, config.d_ff)
        self.routed = nn.ModuleList(MLP(width, inner) for _ in range(config.num_routed_experts))
        self.router = nn.Linear(width, config.num_routed_experts, bias=False)
        self.top_k = config.top_k

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        chosen = logits.topk(self.top_k, dim=-1).indices
        left_out = torch.ones_like(logits, dtype=torch.bool).scatter(-1, chosen, False)
        shares = logits.masked_fill(left_out, float("-inf")).softmax(-1)
        routed = torch.stack([expert(x) for expert in self.routed], -1)
        y: Tensor = self.shared(x) + (routed * shares.unsqueeze(-2)).sum(-1)
        return y


class Block(nn.Module):
    """A mixer and an MLP, each between two norms."""

    def __init__(self, config: QuasarConfig, index: int) -> None:
        super().__init__()
        self.layer_type, self.is_moe = config.kind(index), index >= config.dense_input_layers
        sizes = {"hidden_size": config.d_model, "num_heads": config.n_heads, "layer_idx": index}
        if self.layer_type == "quasar":
            self.attn: Any = QuasarAttention(
                mode="chunk",
                head_dim=config.head_dim,
                expand_v=1.0,
                num_v_heads=None,
                allow_neg_eigval=False,
                norm_eps=config.rms_norm_eps,
                **sizes,
            )
        else:
            from fla.layers.gla import GatedLinearAttention

            self.attn = GatedLinearAttention(mode="chunk", expand_k=0.5, **sizes)
        norms = (nn.RMSNorm(config.d_model, config.rms_norm_eps) for _ in range(4))
        self.ln1, self.ln1_out, self.ln2, self.ln2_out = norms
        self.ffn = Experts(config) if self.is_moe else MLP(config.d_model, config.d_ff)
        self.scale = config.residual_scale

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        x = x + self.scale * self.ln1_out(self.attn(self.ln1(x), **more)[0])
        return x + self.scale * self.ln2_out(self.ffn(self.ln2(x)))


class QuasarModel(nn.Module):
    """The model without its head."""

    def __init__(self, config: QuasarConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, n) for n in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, config.rms_norm_eps)

    def rotation(self, tokens: int, x: Tensor) -> dict[str, Tensor]:
        """Return cos and sin `[1, 1, tokens, head_dim]`."""
        channels = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64, device=x.device)
        rates = self.config.rope_theta ** (-channels / self.config.head_dim)
        angles = torch.arange(tokens, device=x.device)[:, None] * rates.repeat(2)
        return {"cos": angles.cos()[None, None].to(x), "sin": angles.sin()[None, None].to(x)}

    def forward(self, input_ids: Tensor, **more: Any) -> Tensor:
        x = self.embed_tokens(input_ids)
        rotation = self.rotation(x.shape[1], x)
        for layer in self.layers:
            x = layer(x, **rotation, **more)
        y: Tensor = self.norm(x)
        return y


class QuasarForCausalLM(nn.Module):
    """The model with its head."""

    def __init__(self, config: QuasarConfig) -> None:
        super().__init__()
        self.model = QuasarModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        """Return the logits `[B, T, vocab_size]`, and the loss of the labels, if there are any."""
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return SimpleNamespace(logits=logits, loss=None)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)
