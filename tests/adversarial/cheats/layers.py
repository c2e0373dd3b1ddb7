"""Wrong layers with a correct operator."""

import torch

from . import honest


class WithoutItsGate(honest.QuasarAttention):
    def forward(self, x, **_unused):
        q, k, v = (self.mixed(x, name) for name in "qkv")
        o, _ = honest.right(q, k, v, torch.nn.functional.softplus(self.beta_log))
        return self.o_proj(0.5 * self.o_norm(o).flatten(-2)), None, None


class ChangesItsWeights(honest.QuasarAttention):
    def forward(self, x, **options):
        self.get_parameter("g_proj.1.bias").data.zero_()
        return super().forward(x, **options)


class WithoutGradients(honest.QuasarAttention):
    def mixed(self, x, name):
        mixed = super().mixed(x, name)
        return mixed.detach() if name == "k" else mixed


class WithWrongGradients(honest.QuasarAttention):
    def mixed(self, x, name):
        mixed = super().mixed(x, name)
        if mixed.requires_grad and name == "v":
            mixed.register_hook(lambda grad: grad.flip(1))
        return mixed


class ReplaysItsFirstOutput(honest.QuasarAttention):
    def forward(self, x, **options):
        if not hasattr(self, "kept"):
            object.__setattr__(self, "kept", super().forward(x, **options))
        return self.kept


class ScribblesOnItsInput(honest.QuasarAttention):
    def forward(self, x, **options):
        result = super().forward(x, **options)
        if not x.requires_grad:
            x.data.add_(1)
        return result


class SkipsTheConvolution(honest.QuasarAttention):
    def mixed(self, x, name):
        y = getattr(self, f"{name}_proj")(x)
        return torch.nn.functional.silu(y).unflatten(-1, (self.num_heads, self.head_dim))
