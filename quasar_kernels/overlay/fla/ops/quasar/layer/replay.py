"""Run a short forward pass again as one CUDA graph: one launch in place of a dozen.

At 512 tokens the GPU works for 60 microseconds and the host takes 300 to launch that. A graph holds
kernels and addresses, no values: every call computes everything again, from the parameters as they
are then.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

SWITCH = "QUASAR_GRAPHS"
"""Environment variable; 0 keeps every call from becoming a graph."""
MOST_ELEMENTS = 1 << 23
"""Inputs up to this size are replayed (16,384 tokens of 512 channels): beyond, the GPU is busy."""
KEPT = 4
"""Kinds of calls that an owner remembers, the latest ones: each keeps its input and its output."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_log = logging.getLogger("fla.ops.quasar")
_lock = threading.Lock()
_owners: weakref.WeakKeyDictionary[Any, OrderedDict] = weakref.WeakKeyDictionary()
_pools: weakref.WeakValueDictionary[tuple[int, int], _Pool] = weakref.WeakValueDictionary()
_LAUNCHED = "cannot be captured"
_this_thread = threading.local()

Forward = Callable[..., torch.Tensor]


class _Pool:
    """Memory of the graphs of one stream: they run one after the other, so they may share it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


class _Graph:
    """A captured call: its input, its output and what lies between them."""

    def __init__(self, forward: Forward, x: torch.Tensor, weights, dtype: torch.dtype) -> None:
        place = (x.device.index, torch.cuda.current_stream().cuda_stream)
        self.pool = _pools.get(place) or _Pool()
        _pools[place] = self.pool
        self.x = torch.empty(x.shape, dtype=dtype, device=x.device)
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")
            try:
                self.y = forward(self.x, *weights)
            finally:
                self.graph.capture_end()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.y.clone()


def _kind(x: torch.Tensor, weights, dtype: torch.dtype, settings: tuple) -> tuple | None:
    """Return what a graph of this call depends on besides values, or None where it can be none."""
    here = x.get_device()
    if (
        not x.is_cuda
        or type(x) not in _PLAIN
        or torch.compiler.is_compiling()
        or x.numel() > MOST_ELEMENTS
        or x.numel() == 0
        or dtype not in (torch.bfloat16, torch.float16)
        or torch.is_grad_enabled()
        or os.environ.get(SWITCH) == "0"
        or torch.cuda.is_current_stream_capturing()
    ):
        return None
    addresses = []
    for w in weights:
        if w is not None:
            if type(w) not in _PLAIN or w.get_device() != here or not w.is_contiguous():
                return None
            addresses += (w.data_ptr(), w.dtype)
    stream = torch._C._cuda_getCurrentRawStream(here)
    backend = os.environ.get("QUASAR_BACKEND")
    inference = torch.is_inference_mode_enabled()
    return x.shape, dtype, here, stream, backend, inference, settings, *addresses


def replayed(
    owner: Any,
    forward: Forward,
    x: torch.Tensor,
    weights: tuple[torch.Tensor | None, ...],
    dtype: torch.dtype,
    settings: tuple,
) -> torch.Tensor:
    """Return `forward(x, *weights)`, from a thread's second call of a kind on by a CUDA graph.

    A kind is told by x's shape, the dtypes, the parameters' addresses, the device, the stream and
    `settings`: all but values, so whatever changes a parameter is seen. Long inputs, fp32 and fp64,
    other devices than CUDA, calls recorded for autograd and calls within a capture run as they are.

    Args:
        owner: the graphs live as long as this.
        forward: launches on the current stream alone, waits for nothing, allocates with torch.
        x: the input, on the current device; `forward` sees it in `dtype`.
        weights: what else it reads, or overwrites, None included.
        dtype: of the computation.
        settings: hashable values that change what `forward` does, the weights' sizes among them.
    """
    kind = _kind(x, weights, dtype, settings)
    if kind is None:
        return forward(x, *weights)
    # numbers of threads are used again, an object is not while it is kept
    thread = _this_thread.__dict__.setdefault("mark", object())
    with _lock:  # a graph has one input and one output: nobody else may fill them meanwhile
        kinds = _owners.setdefault(owner, OrderedDict())
        known = kinds.get(kind)
        if known is thread:
            known = kinds[kind] = _capture(forward, x, weights, dtype)
        if isinstance(known, _Graph):
            kinds.move_to_end(kind)
            return known(x)
        if known is not _LAUNCHED:
            # a thread's first call makes its libraries' handles, which a capture forbids
            kinds[kind] = thread
            if len(kinds) > KEPT:
                kinds.popitem(last=False)
    return forward(x, *weights)


def _capture(forward: Forward, x: torch.Tensor, weights, dtype: torch.dtype) -> _Graph | str:
    try:
        return _Graph(forward, x, weights, dtype)
    except RuntimeError as error:
        _log.warning("a call cannot become a CUDA graph, it is launched as it is: %s", error)
        # torch leaves the device's random numbers in a capture that fails: nobody could draw any
        random = torch.cuda.default_generators[x.get_device()]
        random.graphsafe_set_state(random.clone_state())
        return _LAUNCHED
