"""Run a call of the layer again as one CUDA graph: one launch in place of dozens.

At 512 tokens the GPU works for 45 microseconds and the host takes 300 to launch that; a backward
pass takes it two milliseconds. A graph holds kernels and addresses, no values: every call computes
everything again, from the parameters as they are then.
"""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fla.ops.quasar import switches

MOST_ELEMENTS = 1 << 23
"""Inputs up to this size are replayed (16,384 tokens of 512 channels): beyond, the GPU is busy."""
KEPT = 8
"""Kinds of calls that an owner remembers, the latest ones: each is a graph of dozens of kernels."""

_address, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_stride = torch.Tensor.stride
_dtype, _shape = operator.attrgetter("dtype"), operator.attrgetter("shape")
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
_log = logging.getLogger("fla.ops.quasar")
_lock = threading.Lock()
_owners: weakref.WeakKeyDictionary[Any, OrderedDict[Key, Any]] = weakref.WeakKeyDictionary()
_pools: weakref.WeakValueDictionary[tuple[int, int], _Pool] = weakref.WeakValueDictionary()
_LAUNCHED = "cannot be captured"
_this_thread = threading.local()

Key = tuple[Any, ...]
Inputs = Sequence[torch.Tensor]
Tensors = Sequence["torch.Tensor | None"]
Compute = Callable[..., tuple[Tensors, Tensors]]
"""Computes a call: returns its outputs, and what only `finish` reads."""
Finish = Callable[..., Any]
CopiedAs = Callable[[torch.Tensor], torch.dtype]


class _Pool:
    """Memory of the graphs of one stream: they run one after the other, so they may share it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # of all captures: torch's allocator gives a block again only to the stream that had it
        self.stream = torch.cuda.Stream()


def _places(inputs: Inputs) -> Key:
    return *map(_address, inputs), *map(_dtype, inputs), *map(_stride, inputs)


class _Seen(NamedTuple):
    """A call that was launched: the thread that did, and where it found its inputs."""

    thread: object
    places: Key | None  # None where they have moved before


class _Graph:
    """A captured call: where its inputs lay, or its copies of them where one `moves`.

    It keeps no memory of its own: its outputs and the copies lie in the pool, as what is between
    does, where the next replay of any graph of the stream overwrites them.
    """

    def __init__(
        self, compute: Compute, inputs: Inputs, tensors: Tensors, copied: CopiedAs, moves: bool
    ) -> None:
        first: Any = (*inputs, *tensors)[0]  # there is no call without a tensor
        place = (first.device.index, torch.cuda.current_stream().cuda_stream)
        self.pool = _pools.get(place) or _Pool()
        _pools[place] = self.pool
        self.places = None if moves else _places(inputs)
        self.graph = torch.cuda.CUDAGraph()
        self.pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.pool.stream):
            self.graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")
            try:
                if moves:
                    inputs = [
                        torch.empty(x.shape, dtype=copied(x), device=x.device) for x in inputs
                    ]
                outputs, rest = compute(*inputs, *tensors)
            finally:
                self.graph.capture_end()
        self.copies = [_unowned(x) for x in inputs] if moves else ()
        self.outputs = [None if x is None else _unowned(x) for x in outputs]
        self.rest = [None if x is None else _unowned(x) for x in rest]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
        if self.copies:
            for copy, x in zip(self.copies, inputs, strict=True):
                copy.copy_(x)
        self.graph.replay()
        return _renewed(self.outputs), self.rest


def _unowned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor where `x` lies that leaves the memory to the pool."""
    construct = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if construct is None:  # torch does not promise it: then the memory is this graph's alone
        return x
    memory = x.untyped_storage()
    same = construct(memory.data_ptr(), x.device, memory.nbytes())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        same, x.storage_offset(), x.shape, x.stride()
    )


def _renewed(outputs: Tensors) -> Tensors:
    """Return `outputs` as tensors of their own: the next replay overwrites them."""
    given = [x for x in outputs if x is not None]
    if len(given) < 2:  # none where every weight is frozen
        return [None if x is None else x.clone() for x in outputs]
    found = [None if x is None else torch.empty_like(x) for x in outputs]
    torch._foreach_copy_([x for x in found if x is not None], given)
    return found


def _may_be_replayed(first: torch.Tensor, dtype: torch.dtype, most: int) -> bool:
    return (
        first.is_cuda
        and 0 < first.numel() <= most
        and dtype in (torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and switches.graphs()
        and not torch.cuda.is_current_stream_capturing()
    )


def _kind(inputs: Inputs, tensors: Tensors, dtype: torch.dtype, settings: Key) -> Key | None:
    """Return what a graph of this call depends on besides values, or None where it can be none.

    An address tells the device, too; those of the inputs are left to `_places`.
    """
    # whole passes in C: at 512 tokens this is a tenth of the host's time
    types = (*map(type, tensors), *map(type, inputs))
    if not _PLAIN.issuperset(types):
        return None
    given = [x for x in tensors if x is not None]
    here = (inputs or given)[0].get_device()
    stream = torch._C._cuda_getCurrentRawStream(here)
    strides = None if all(map(_is_contiguous, given)) else (*map(_stride, given),)
    return (
        dtype,
        here,
        stream,
        torch.is_inference_mode_enabled(),
        settings,
        types,
        strides,
        *map(_shape, inputs),
        *map(_address, given),
        *map(_dtype, given),
    )


def replayed(
    owner: Any,
    compute: Compute,
    inputs: Inputs,
    tensors: Tensors,
    dtype: torch.dtype,
    settings: Key,
    *,
    most: int = MOST_ELEMENTS,
    finish: Finish | None = None,
    copied: CopiedAs | None = None,
) -> tuple[Tensors, Any]:
    """Call `compute(*inputs, *tensors)`, from a thread's second call of a kind on by a CUDA graph.

    A kind is told by shapes, dtypes, the addresses of `tensors`, the device, the stream and
    `settings`: all but values, so whatever changes a parameter is seen. Long inputs, fp32 and fp64,
    other devices than CUDA, calls recorded for autograd and calls within a capture run as they are.

    Args:
        owner: the graphs live as long as this; None for a call that is never replayed.
        compute: launches on the current stream alone, waits for nothing, allocates with torch, and
            returns its outputs and what only `finish` reads. It sees `inputs` in the dtype that
            `copied` says where they were copied.
        inputs: may lie elsewhere at each call, on the current device; then they are copied.
        tensors: what else it reads, or overwrites, where it lies.
        dtype: of the computation.
        settings: hashable values that change what `compute` does, the tensors' sizes among them.
        most: elements of the first input up to which a call is replayed.
        finish: is called with the rest of what `compute` returned, before anything overwrites that.
        copied: returns the dtype of an input's copy; all are copied to `dtype` without it.

    Returns:
        The outputs, tensors of their own, and what `finish` returned, or None.
    """
    first: Any = inputs[0] if inputs else tensors[0]  # there is no call without a tensor
    kind = None
    if owner is not None and _may_be_replayed(first, dtype, most):
        kind = _kind(inputs, tensors, dtype, settings)
    if kind is not None:
        with _lock:  # graphs have one place for their outputs: nobody else may fill it meanwhile
            known = _known(owner, kind, compute, inputs, tensors, copied or (lambda _: dtype))
            if known is not None:
                outputs, rest = known(inputs)
                return outputs, finish and finish(*rest)
    outputs, rest = compute(*inputs, *tensors)
    return outputs, finish and finish(*rest)


def _known(
    owner: Any, kind: Key, compute: Compute, inputs: Inputs, tensors: Tensors, copied: CopiedAs
) -> _Graph | None:
    """Return the graph of a call, captured now where it is due, or None for a launch."""
    kinds = _owners.get(owner)
    if kinds is None:
        kinds = _owners[owner] = OrderedDict()
    known, places = kinds.get(kind), _places(inputs)
    if isinstance(known, _Graph) and (known.places is None or known.places == places):
        kinds.move_to_end(kind)
        return known
    # numbers of threads are used again, an object is not while it is kept
    thread = _this_thread.__dict__.setdefault("mark", object())
    if type(known) is _Seen and known.thread is thread:
        known = kinds[kind] = _capture(compute, inputs, tensors, copied, known.places != places)
        kinds.move_to_end(kind)
        return known if isinstance(known, _Graph) else None
    if known is not _LAUNCHED:
        # a thread's first call makes its libraries' handles, which a capture forbids
        kinds[kind] = _Seen(thread, None if isinstance(known, _Graph) else places)
        kinds.move_to_end(kind)
        if len(kinds) > KEPT:
            kinds.popitem(last=False)
    return None


def _capture(
    compute: Compute, inputs: Inputs, tensors: Tensors, copied: CopiedAs, moves: bool
) -> _Graph | str:
    if torch.cuda.get_allocator_backend() != "native":  # others take memory back between replays
        return _LAUNCHED
    try:
        return _Graph(compute, inputs, tensors, copied, moves)
    except RuntimeError as error:
        _log.warning("a call cannot become a CUDA graph, it is launched as it is: %s", error)
        # torch leaves the device's random numbers in a capture that fails: nobody could draw any
        first: Any = (*inputs, *tensors)[0]
        random = torch.cuda.default_generators[first.get_device()]
        random.graphsafe_set_state(random.clone_state())
        return _LAUNCHED


# SPDX-FileCopyrightText: 2026 The QUASAR miner authors
# SPDX-License-Identifier: MIT
