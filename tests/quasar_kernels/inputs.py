"""Inputs of the kernels' tests, on any device: layer-like inputs, and adversarial keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quasar_kernels.reference import relative_rms


def layer_like(
    T: int,
    B: int = 1,
    H: int = 2,
    S: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k and v `[B, T, H, S]` as in a layer with default weights, and beta `[H]` fp32."""

    def projected() -> Tensor:
        x = torch.randn(B, T, H * S, device=device) / 3**0.5
        taps = (torch.rand(H * S, 1, 4, device=device) - 0.5) / 2**0.5
        y = F.conv1d(F.pad(x.mT, (3, 0)), taps, groups=H * S).mT
        return F.silu(y).to(dtype).contiguous().view(B, T, H, S)

    q, k, v = projected(), projected(), projected()
    return q, k, v, F.softplus(torch.empty(H, device=device).uniform_(1, 16).log())


def common_key(k: Tensor, noise: float) -> Tensor:
    """Return keys of k's shape: one vector per head, plus noise."""
    common = torch.randn(1, 1, *k.shape[2:], device=k.device)
    return (common + noise * torch.randn(k.shape, device=k.device)).to(k.dtype)


def _alternating(k: Tensor) -> Tensor:
    signs = 1 - 2 * (torch.arange(k.shape[1], device=k.device) % 2)
    return k[:, :1] * signs.view(1, -1, 1, 1)


def _of_norm(k: Tensor, norm: float) -> Tensor:
    return F.normalize(k.float(), dim=-1).to(k.dtype) * norm


ADVERSARIAL_KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda k: torch.ones_like(k) * 0.3,
    "alternating": _alternating,
    "one key, 0.01 noise": lambda k: k[:, :1] + 0.01 * torch.randn_like(k),
    "mixed norms": lambda k: (k * 10 ** torch.empty_like(k[..., :1]).uniform_(-3, 1)).to(k.dtype),
    "half zeros": lambda k: k * (torch.rand_like(k[..., :1]) < 0.5),
    "zeros": torch.zeros_like,
    "large": lambda k: _of_norm(k, 80),
    "tiny": lambda k: _of_norm(k, 1e-6),
}
"""Functions that make difficult keys from layer-like ones `[B, T, H, S]`, by name."""


class Part(torch.Tensor):
    """Looks like a DTensor, without a process group."""

    placements = ()


def without_memory(shape):
    """Return tensors of a shape, of two or more dimensions, that kernels cannot read, by name."""
    rows = [torch.randn(shape[1:]), torch.randn(2, *shape[2:])]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return {"Part": torch.randn(shape).as_subclass(Part), "nested tensor": nested}


def packed(lengths: Sequence[int], device: str = "cpu", dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the bounds `[N + 1]` of packed sequences of N lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device, dtype=dtype)


def rows_of_one_tensor(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors `[B, T, H, S]` as views of one tensor whose rows contain all of them."""
    width = tensors[0].shape[2] * tensors[0].shape[3]
    wide = torch.cat([x.flatten(2) for x in tensors], -1)
    return [x.unflatten(-1, tensors[0].shape[2:]) for x in wide.split(width, -1)]


def assert_close(o: Tensor, expected: Tensor, limit: float) -> None:
    """Compare o with float64's result: as a whole, in each of eight parts, and per value."""
    bad = o.numel() - int(torch.isfinite(o).sum())
    assert bad == 0, f"{bad} of {o.numel()} values are not finite"
    error = float(relative_rms(o, expected))
    assert error <= limit, f"relative RMS error {error:.3g}, limit {limit:.3g}"
    parts = zip(o.tensor_split(8, 1), expected.tensor_split(8, 1), strict=True)
    for number, (part, wanted) in enumerate(parts):
        error, most = float(relative_rms(part, wanted)), limit * 1.05
        where = f"eighth {number + 1} of the tokens"
        assert error <= most, f"{where}: relative RMS error {error:.3g}, limit {most:.3g}"
    worst = float((o.double() - expected).abs().max())
    assert worst <= 0.1, f"largest absolute error {worst:.3g}, limit 0.1"
    if expected.any():
        cosine = float(F.cosine_similarity(o.double().flatten(), expected.flatten(), dim=0))
        assert cosine >= 0.999, f"cosine similarity {cosine:.6f}, limit 0.999"
