"""Replay a call of the layer as one CUDA graph: one launch instead of dozens.

At 512 tokens the GPU works for 45 microseconds, but the host needs 300 to launch the kernels, and
two milliseconds for a backward pass. A graph holds kernels and addresses, no values, so each replay
computes with the current parameters.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from typing import Any, NamedTuple

import torch

from fla.ops.quasar import switches, torch_private

MAX_ELEMENTS = 1 << 23
"""Largest input that is replayed (16,384 tokens of 512 channels); longer calls fill the GPU."""
MAX_GRAPHS = 8
"""Maximum number of graphs of an owner (LRU); each holds dozens of kernels."""

_address, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_stride = torch.Tensor.stride
_dtype, _shape = operator.attrgetter("dtype"), operator.attrgetter("shape")
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
_log = logging.getLogger("fla.ops.quasar")
_lock = threading.Lock()
_owners: weakref.WeakKeyDictionary[Any, OrderedDict[Key, Any]] = weakref.WeakKeyDictionary()
_pools: weakref.WeakValueDictionary[tuple[int, int], _Pool] = weakref.WeakValueDictionary()
_NOT_CAPTURABLE = "cannot be captured"
_this_thread = threading.local()

Key = tuple[Any, ...]
Inputs = Sequence[torch.Tensor]
Tensors = Sequence["torch.Tensor | None"]


@dataclasses.dataclass(frozen=True, eq=False)  # keys of graphs compare operations by identity
class Operation:
    """What a graph computes. All functions take a call's settings, inputs and tensors first."""

    compute: Callable[[Any, Inputs, Tensors], tuple[Tensors, Tensors]]
    """Launches on the current stream only, never synchronizes, and allocates with torch.

    Returns the outputs, and tensors that only `finish` reads."""
    finish: Callable[[Any, Inputs, Tensors, Tensors], Any]
    """Is called outside of the graph with these tensors, if there are any, before the next replay
    overwrites them."""
    input_dtypes: Callable[[Any, Inputs, Tensors], Sequence[torch.dtype]]
    """Returns the dtypes of the graph's copies of the inputs."""


class _Pool:
    """The memory pool of one stream's graphs; they run one after another, so they can share it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # captures share a stream, because torch's allocator reuses a block only on its first stream
        self.stream = torch.cuda.Stream()


class _Launched(NamedTuple):
    """A call that was launched without a graph: its thread, and the addresses of its inputs."""

    thread: object
    addresses: Key | None  # None if an earlier graph's addresses had changed


class _Graph:
    """A captured call. It reads its inputs at their addresses or, if these change, copies of them.

    It owns no memory. Its outputs, copies and intermediate results are in the pool, where the next
    replay of any graph of the stream overwrites them.
    """

    def __init__(
        self,
        operation: Operation,
        settings: Any,
        inputs: Inputs,
        tensors: Tensors,
        addresses: Key | None,
    ) -> None:
        first: Any = (*inputs, *tensors)[0]  # every call has a tensor
        place = (first.device.index, torch.cuda.current_stream().cuda_stream)
        self.pool = _pools.get(place) or _Pool()
        _pools[place] = self.pool
        self.addresses = addresses
        moves = addresses is None
        self.graph = torch.cuda.CUDAGraph()
        self.pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.pool.stream):
            self.graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")
            try:
                if moves:
                    dtypes = operation.input_dtypes(settings, inputs, tensors)
                    inputs = [
                        torch.empty(x.shape, dtype=dtype, device=x.device)
                        for x, dtype in zip(inputs, dtypes, strict=True)
                    ]
                outputs, rest = operation.compute(settings, inputs, tensors)
            finally:
                self.graph.capture_end()
        self.copies = [torch_private.without_ownership(x) for x in inputs] if moves else ()
        self.outputs = [None if x is None else torch_private.without_ownership(x) for x in outputs]
        self.rest = [None if x is None else torch_private.without_ownership(x) for x in rest]

    def replay(self, inputs: Inputs) -> tuple[Tensors, Tensors]:
        """Return copies of the outputs, and the tensors that `finish` reads."""
        if self.copies:
            for copy, x in zip(self.copies, inputs, strict=True):
                copy.copy_(x)
        self.graph.replay()
        if len(self.outputs) < 2:  # a forward pass; None cannot be among its outputs
            return list(map(torch.clone, self.outputs)), self.rest  # type: ignore[arg-type]
        return _copied(self.outputs), self.rest


def _copied(outputs: Tensors) -> Tensors:
    """Return copies of `outputs`, which the next replay overwrites."""
    present = [x for x in outputs if x is not None]
    if len(present) < 2:  # none if all weights are frozen
        return [None if x is None else x.clone() for x in outputs]
    copies = [None if x is None else torch.empty_like(x) for x in outputs]
    torch_private.copy_all([x for x in copies if x is not None], present)
    return copies


def _may_be_replayed(first: torch.Tensor, dtype: torch.dtype, max_elements: int) -> bool:
    return (
        first.is_cuda
        and 0 < first.numel() <= max_elements
        and dtype in (torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and switches.graphs()
        and not torch.cuda.is_current_stream_capturing()
    )


def _graph_key(inputs: Inputs, tensors: Tensors, dtype: torch.dtype, settings: Key) -> Key | None:
    """Return the key of this call's graph, or None if it cannot be a graph.

    A graph depends on this key and the inputs' addresses, dtypes and strides, but on no values.
    """
    # map() iterates in C: at 512 tokens this key takes a tenth of the host's time
    types = (*map(type, tensors), *map(type, inputs))
    if not _PLAIN.issuperset(types):
        return None
    present: list[Any] = [*compress(tensors, map(operator.is_not, tensors, repeat(None)))]
    device = (inputs or present)[0].get_device()
    stream = torch_private.raw_stream(device)
    strides = None if all(map(_is_contiguous, present)) else (*map(_stride, present),)
    return (
        dtype,
        device,
        stream,
        torch.is_inference_mode_enabled(),
        settings,
        types,
        strides,
        *map(_shape, inputs),
        *map(_address, present),
        *map(_dtype, present),
    )


def launch_or_replay(
    owner: Any,
    operation: Operation,
    settings: Any,
    inputs: Inputs,
    tensors: Tensors,
    dtype: torch.dtype,
    max_elements: int = MAX_ELEMENTS,
) -> tuple[Tensors, Any]:
    """Compute an operation: launch its kernels, or replay their graph.

    A thread's second call with the same key captures the graph. The key consists of the operation,
    its settings, shapes, dtypes, the addresses of `tensors`, the device and the stream, but no
    values, so changed parameters take effect. Long inputs, fp32 and fp64, devices other than CUDA,
    calls recorded for autograd, and calls within a capture use no graph.

    Args:
        owner: the graphs are dropped together with this object; None for no replay.
        operation: what to compute.
        settings: hashable values on which it depends, for example a `Call`.
        inputs: on the current device; they are copied if their addresses differ between calls.
        tensors: other tensors that the operation reads or overwrites in place.
        dtype: the dtype of the computation.
        max_elements: maximum number of elements of the first input for a replay.

    Returns:
        The outputs (those of a graph are copied), and the result of `finish`, or an empty tuple
        if `compute` returned no tensors for it.
    """
    first: Any = inputs[0] if inputs else tensors[0]  # every call has a tensor
    key = None
    if owner is not None and _may_be_replayed(first, dtype, max_elements):
        key = _graph_key(inputs, tensors, dtype, (operation, settings))
    if key is not None:
        with _lock:  # replays overwrite a graph's outputs, so only one thread may use it
            graph = _find_graph(owner, key, operation, settings, inputs, tensors)
            if graph is not None:
                outputs, rest = graph.replay(inputs)
                return outputs, rest and operation.finish(settings, inputs, tensors, rest)
    outputs, rest = operation.compute(settings, inputs, tensors)
    return outputs, rest and operation.finish(settings, inputs, tensors, rest)


def _find_graph(
    owner: Any, key: Key, operation: Operation, settings: Any, inputs: Inputs, tensors: Tensors
) -> _Graph | None:
    """Return the call's graph, captured at the second call; None if kernels must be launched."""
    graphs = _owners.get(owner)
    if graphs is None:
        graphs = _owners[owner] = OrderedDict()
    entry = graphs.get(key)
    addresses = *map(_address, inputs), *map(_dtype, inputs), *map(_stride, inputs)
    if isinstance(entry, _Graph) and (entry.addresses is None or entry.addresses == addresses):
        graphs.move_to_end(key)
        return entry
    # the thread is identified by an object, because ids of threads are reused
    thread = _this_thread.__dict__.setdefault("mark", object())
    if type(entry) is _Launched and entry.thread is thread:
        same = addresses if entry.addresses == addresses else None
        entry = graphs[key] = _capture(operation, settings, inputs, tensors, same)
        graphs.move_to_end(key)
        return entry if isinstance(entry, _Graph) else None
    if entry is not _NOT_CAPTURABLE:
        # a thread's first call is not captured: it creates library handles, which a capture forbids
        graphs[key] = _Launched(thread, None if isinstance(entry, _Graph) else addresses)
        graphs.move_to_end(key)
        if len(graphs) > MAX_GRAPHS:
            graphs.popitem(last=False)
    return None


def _capture(
    operation: Operation, settings: Any, inputs: Inputs, tensors: Tensors, addresses: Key | None
) -> _Graph | str:
    # graphs keep no memory themselves, and other allocators reclaim it between replays
    if torch.cuda.get_allocator_backend() != "native":
        return _NOT_CAPTURABLE
    try:
        return _Graph(operation, settings, inputs, tensors, addresses)
    except RuntimeError as error:
        _log.warning("a call cannot become a CUDA graph, so its kernels are launched: %s", error)
        # after a failed capture torch leaves the device's generator in capture mode: reset it
        first: Any = (*inputs, *tensors)[0]
        random = torch.cuda.default_generators[first.get_device()]
        random.graphsafe_set_state(random.clone_state())
        return _NOT_CAPTURABLE


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
