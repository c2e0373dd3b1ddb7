"""The chain of a proof: the digest of an output, and the next call's factors from a digest.

The subject computes it during the calls, the referee afterwards. docs/honesty.md derives why
digests are coarse, why norms are summed, and which share of an output can be skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.workload import WORKLOAD

RUN = 32
"""Tokens of a run. Its norm depends on all of them and is not linear in any."""

STEP = 0.25
"""Digests are rounded to this share of the root mean square of an output times sqrt(runs)."""

SCALED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.0.weight")
"""The weights that read the input; their columns are multiplied by each call's factors."""

MAX_CALLS = 8192
"""Most calls of a chain: at 512 tokens and 12 microseconds per call they take 100 ms."""

LARGEST = 48
"""Largest number accepted in a digest, four times the largest that occurs. Without a limit, the
subject could compute a false digest that gives the next call an input of its choice."""

_LEVELS = 256
_WIDTH = math.sqrt(12)  # of the uniform distribution of variance 1
_MAX_GRAPHS = 8


def drawn(shape: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """Return standard normal fp32 values, the same in each process for a seed and a device.

    Referee and subject draw long inputs from a common seed, instead of sending gigabytes.
    """
    return fill(torch.empty(*shape, device=device), seed)


def fill(tensor: Tensor, seed: int) -> Tensor:
    """Fill a contiguous fp32 tensor with the values of `drawn` for its shape, and return it."""
    return tensor.normal_(generator=torch.Generator(tensor.device).manual_seed(seed))


@dataclass(frozen=True)
class ChainMaps:
    """The maps from outputs to digests and from digests to factors."""

    # `[runs]`, +1 for half of the runs of tokens and -1 for the others, divided by the unit of
    # rounding
    signs: Tensor
    # multiples of 1/256 below 1, `[channels, channels]`: sums of products with digests are exact in
    # fp32, so that each process computes the same factors
    mixing: Tensor

    @classmethod
    def draw(cls, length: int, size: float, seed: int, device: torch.device) -> ChainMaps:
        """Draw the maps for outputs of `length` tokens with the root mean square `size`."""
        runs, channels = -(-length // RUN), WORKLOAD.hidden_size
        order = drawn((runs,), seed, device).argsort()
        signs = 1.0 - 2.0 * (order % 2)
        values = drawn((channels, channels), seed + 1, device) * 1e4
        mixing = values.round().remainder(_LEVELS) / _LEVELS
        return cls(signs / (STEP * size * math.sqrt(runs)), mixing)

    def sums(self, y: Tensor, first: int = 0) -> Tensor:
        """Return the signed sums `[B, channels]` of the norms of runs of y `[B, T, channels]`.

        `first` is the place of y's first run in the sequence.
        """
        whole = y.shape[1] // RUN * RUN
        runs = y[:, :whole].reshape(len(y), whole // RUN, RUN, y.shape[2])
        norms: Tensor = torch.linalg.vector_norm(runs, dim=2, dtype=torch.float32)
        if whole < y.shape[1]:
            rest = torch.linalg.vector_norm(y[:, whole:], dim=1, keepdim=True, dtype=torch.float32)
            norms = torch.cat((norms, rest), dim=1)
        return norms.mul_(self.signs[first : first + norms.shape[1], None]).sum(1)

    def fractions(self, key: Tensor, digest: Tensor) -> Tensor:
        """Return multiples of 1/256 in [0, 1) by key and digest, `[channels]` each."""
        return torch.addmv(key, self.mixing, digest).remainder_(1)

    def factors(self, keys: Tensor, digests: Tensor) -> Tensor:
        """Return factors of mean 0 and variance 1 by `[calls, channels]` keys and digests."""
        both = zip(keys, digests, strict=True)
        return _WIDTH * torch.stack([self.fractions(*pair) for pair in both]) + _offset()


def fill_keys(keys: Tensor, seed: int) -> Tensor:
    """Write a chain's keys into `[calls, channels]`, multiples of 1/256, and return it.

    Without keys, one false digest would lead into a chain that was computed before.
    """
    generator = torch.Generator(keys.device).manual_seed(seed)
    return keys.random_(_LEVELS, generator=generator).div_(_LEVELS)


def _offset() -> float:
    return _WIDTH * (0.5 / _LEVELS - 0.5)


class Link:
    """The work between two calls: store the digest, and multiply the weights by the next factors.

    The weights, `[outputs, channels]` each, are scaled in place. A chain has at most `calls` calls.
    """

    def __init__(self, maps: ChainMaps, weights: Sequence[Tensor], calls: int) -> None:
        self._maps, self._weights = maps, list(weights)
        stacked = torch.cat(self._weights)
        self._slope, self._offset = _WIDTH * stacked, _offset() * stacked
        self.digests = stacked.new_zeros(calls, stacked.shape[1])
        # one more than calls: the last call prepares the weights of a further one
        self._keys = stacked.new_zeros(calls + 1, stacked.shape[1])
        self._at = torch.zeros(1, dtype=torch.int64, device=stacked.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if stacked.is_cuda else None

    @torch.no_grad()
    def start(self, seed: int, calls: int) -> None:
        """Begin a chain; its calls' keys have this seed."""
        fill_keys(self._keys[:calls], seed)
        self._at.zero_()
        self._rescale(self._keys.new_zeros(self._keys.shape[1]))

    @torch.no_grad()
    def __call__(self, y: Tensor) -> None:
        """Process a call's output `[1, T, channels]`, with one CUDA graph for each address of y."""
        place = y.data_ptr()
        if not y.is_cuda or (place not in self._graphs and len(self._graphs) == _MAX_GRAPHS):
            self._link(y)
        elif place not in self._graphs:  # libraries must be initialised before a capture
            self._graphs[place] = None
            self._link(y)
        else:
            graph = self._graphs[place]
            if graph is None:
                graph = self._graphs[place] = self._captured(y)
            graph.replay()

    def _captured(self, y: Tensor) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._link(y)
            finally:
                graph.capture_end()
        return graph

    def _link(self, y: Tensor) -> None:
        digest = self._maps.sums(y).round_()
        self.digests.index_copy_(0, self._at, digest)
        self._at.add_(1)
        self._rescale(digest[0])

    def _rescale(self, digest: Tensor) -> None:
        key = self._keys.index_select(0, self._at)[0]
        fractions = self._maps.fractions(key, digest)
        scaled = torch.addcmul(self._offset, self._slope, fractions)
        sizes = [len(weight) for weight in self._weights]
        torch._foreach_copy_(self._weights, torch.split(scaled, sizes))
