"""A block of parallel sequence mixers, their fusion, and an MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from fla.ops.quasar.arguments import expect, expect_sizes
from fla.ops.quasar.parallel.context import place_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from quasar_kernels.blocks import MIXERS
from quasar_kernels.blocks.backends import Backend
from quasar_kernels.blocks.fusion import FUSIONS
from quasar_kernels.blocks.mamba2 import Mamba2
from quasar_kernels.blocks.quasar import QuasarMixer
from quasar_kernels.blocks.rwkv6 import RWKV6TimeMixing

OUTPUT_SCALES = {"rwkv6": 2.1, "mamba2": 0.46}
"""Initial factors of mixers' output weights, which make all outputs as large as QuasarAttention's.
Without them, an input of RMS 1 gives outputs of RMS 0.13 and 0.57; QuasarAttention's have 0.28."""
BlockState = dict[str, Any]
"""Each mixer's state, by the mixer's name."""


class HybridBlock(nn.Module):
    """Mixes tokens in parallel branches, then channels in an MLP, both with norms and residuals.

    Args:
        width: channels of the input and the output.
        heads: heads of each branch.
        mixers: one or more names of `MIXERS`, or the names joined by `+`.
        fusion: `gains`, per channel, initially 0.7 for the first branch and 0.3 for the others;
            `gated`, a softmax per token and head; or `mean`, of normalised branches.
        layer, layers: the block's index from 0, and the number of blocks of the model.
        state: Mamba-2's state size.
        inner: the MLP's inner width; None is four times `width`.
        checkpoint_above: the length above which the backward pass recomputes the block instead of
            storing intermediate results; None for never.

    Raises:
        ValueError: an unknown or repeated mixer, an unknown fusion, or sizes that do not fit.
    """

    def __init__(  # noqa: PLR0913 # sizes, passed by name
        self,
        width: int,
        heads: int,
        mixers: Sequence[str] | str = MIXERS,
        fusion: str = "gains",
        layer: int = 0,
        layers: int = 1,
        state: int = 64,
        inner: int | None = None,
        checkpoint_above: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(mixers, str):
            mixers = mixers.split("+")
        if not mixers or set(mixers) - set(MIXERS) or len(set(mixers)) < len(mixers):
            allowed = ", ".join(MIXERS)
            raise ValueError(f"mixers must be some of {allowed}, each once; got {mixers!r}")
        if fusion not in FUSIONS:
            raise ValueError(f"fusion must be one of {', '.join(FUSIONS)}; got {fusion!r}")
        inner = 4 * width if inner is None else inner
        expect_sizes(width=width, heads=heads, inner=inner)
        self.checkpoint_above = checkpoint_above
        builders: dict[str, Callable[[], nn.Module]] = {
            "rwkv6": lambda: RWKV6TimeMixing(
                width, heads, layer, layers, output_scale=OUTPUT_SCALES["rwkv6"]
            ),
            "mamba2": lambda: Mamba2(width, heads, state, output_scale=OUTPUT_SCALES["mamba2"]),
            "quasar": lambda: QuasarMixer(width, heads),
        }
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mixers = nn.ModuleDict({name: builders[name]() for name in mixers})
        self.fusion = FUSIONS[fusion](len(mixers), width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(
        self,
        x: Tensor,
        state: BlockState | None = None,
        cu_seqlens: Tensor | None = None,
        keep: bool = False,
        cp_context: Any = None,
    ) -> tuple[Tensor, BlockState | None]:
        """Apply the block.

        Args:
            x: `[B, T, width]`.
            state: returned by an earlier call; None starts from zero states. This call may
                overwrite it, so copy it with `copy.deepcopy` to continue from it twice.
            cu_seqlens: `[N + 1]` bounds of sequences packed in one row (B = 1).
            keep: whether to return the state, for decoding.
            cp_context: from `build_cp_context`. x is then this rank's slice of packed sequences,
                and the context's bounds replace cu_seqlens. `state` must be None, and all ranks
                must call. `keep` needs a single sequence; the last rank returns its state. The
                parameters' gradients are those of the slice and must be summed over the ranks.

        Returns:
            y `[B, T, width]`, and the state after each sequence or None.

        Raises:
            ValueError: inconsistent shapes, or a state of a block with other mixers.
        """
        expect("x", x, ("B", "T", self.norm.weight.shape[0]))
        if state is not None and (not isinstance(state, dict) or set(state) != set(self.mixers)):
            got = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"state must come from a block of {[*self.mixers]}; got {got}")
        longest = x.shape[1]  # over all ranks, because all must recompute or none
        if cp_context is not None:
            longest = place_of(cp_context, longest).longest
        recompute = self.checkpoint_above is not None and longest > self.checkpoint_above
        call = x, state, cu_seqlens, keep, cp_context
        if recompute and not keep and state is None and torch.is_grad_enabled():
            result: tuple[Tensor, BlockState | None] = checkpoint(
                self._run, *call, use_reentrant=False, preserve_rng_state=False
            )
            return result
        return self._run(*call)

    def _run(
        self,
        x: Tensor,
        state: BlockState | None,
        cu_seqlens: Tensor | None,
        keep: bool,
        cp_context: Any,
    ) -> tuple[Tensor, BlockState | None]:
        normed, states = _narrowed(self.norm(x)), dict[str, Any]()

        def mixed(name: str) -> Tensor:
            mixer, last = self.mixers[name], None if state is None else state[name]
            if isinstance(mixer, QuasarMixer):
                y, states[name] = mixer(normed, last, cu_seqlens, keep, cp_context)
            else:
                y, states[name] = mixer(normed, last, cu_seqlens, cp_context)
            return y

        outputs = _run_branches([partial(mixed, name) for name in self.mixers], normed)
        for added in self.fusion(normed, outputs):
            x = x + added
        return torch.add(x, self.mlp(_narrowed(self.mlp_norm(x)))), states if keep else None

    def backends(self, dtype: torch.dtype | None = None) -> dict[str, Backend]:
        """Return each branch's backend, with the reason; `dtype` as in the mixers' `backend`."""
        return {name: mixer.backend(dtype) for name, mixer in self.mixers.items()}  # type: ignore[operator]


def _narrowed(x: Tensor) -> Tensor:
    """Return x in autocast's dtype if autocast is on, so that it is rounded only once."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _run_branches(branches: Sequence[Callable[[], Tensor]], x: Tensor) -> list[Tensor]:
    """Return the results of the branches; `x` is their input.

    While a CUDA graph is captured, all but the first run on separate streams, and so do their
    backward passes. Outside a capture the host limits the speed, and streams would slow it down.
    """
    if len(branches) < 2 or not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return [branch() for branch in branches]
    here = torch.cuda.current_stream(x.device)
    results = []
    for n, branch in enumerate(branches):
        if n == 0:
            results.append(branch())
            continue
        stream = _stream(x.device, n)
        stream.wait_stream(here)
        x.record_stream(stream)
        with torch.cuda.stream(stream):
            results.append(branch())
        results[-1].record_stream(here)
    for n in range(1, len(branches)):
        here.wait_stream(_stream(x.device, n))
    return results


@cache
def _stream(device: torch.device, _number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
