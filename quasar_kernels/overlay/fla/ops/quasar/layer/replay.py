"""Run a call of the layer again as one CUDA graph: one launch in place of dozens.

At 512 tokens the GPU works for 45 microseconds and the host takes 300 to launch that; a backward
pass takes it two milliseconds. A graph holds kernels and addresses, no values: every call computes
everything again, from the parameters as they are then.
"""

from __future__ import annotations

import logging
import math
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
"""Kinds of calls that an owner remembers, the latest ones: each keeps its outputs."""

_address, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_dtype = operator.attrgetter("dtype")
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
_log = logging.getLogger("fla.ops.quasar")
_lock = threading.Lock()
_owners: weakref.WeakKeyDictionary[Any, OrderedDict[Key, Any]] = weakref.WeakKeyDictionary()
_pools: weakref.WeakValueDictionary[tuple[int, int], _Pool] = weakref.WeakValueDictionary()
_LAUNCHED = "cannot be captured"
_this_thread = threading.local()

Key = tuple[Any, ...]
Shape = tuple[int, ...]
Inputs = Sequence[torch.Tensor]
Tensors = Sequence["torch.Tensor | None"]
Compute = Callable[..., tuple[Tensors, Tensors]]
"""Computes a call: returns its outputs, and what only `finish` reads."""
Finish = Callable[..., Any]


class _Pool:
    """Memory of the graphs of one stream: they run one after the other, so they may share it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # of all captures: torch's allocator gives a block again only to the stream that had it
        self.stream = torch.cuda.Stream()
        self._scratch: torch.Tensor | None = None

    def scratch(self, shape: Shape, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=like.device)
        return self._scratch[:size].view(dtype).view(shape)


def _places(inputs: Inputs) -> Key:
    return tuple((x.data_ptr(), x.dtype, x.stride()) for x in inputs)


class _Seen(NamedTuple):
    """A call that was launched: the thread that did, and where it found its inputs."""

    thread: object
    places: Key | None  # None where they have moved before


class _Graph:
    """A captured call: its inputs or their places, and its outputs; a pool has what lies between.

    It reads its inputs where they lay when it was captured, or copies them first where one `moves`.
    """

    def __init__(
        self, compute: Compute, inputs: Inputs, tensors: Tensors, dtype: torch.dtype,
        scratch: Shape | None, moves: bool,
    ) -> None:  # fmt: skip
        first: Any = (*inputs, *tensors)[0]  # there is no call without a tensor
        place = (first.device.index, torch.cuda.current_stream().cuda_stream)
        self.pool = _pools.get(place) or _Pool()
        _pools[place] = self.pool
        self.places = None if moves else _places(inputs)
        if moves:
            inputs = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in inputs]
        self.copies = inputs if moves else ()
        more = {}
        if scratch is not None:
            more = {"scratch": self.pool.scratch(scratch, first, dtype)}
        self.graph = torch.cuda.CUDAGraph()
        self.pool.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.pool.stream):
            self.graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")
            try:
                self.outputs, self.rest = compute(*inputs, *tensors, **more)
            finally:
                self.graph.capture_end()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
        for copy, x in zip(self.copies, inputs, strict=False):  # none where they are read in place
            copy.copy_(x)
        self.graph.replay()
        return _renewed(self.outputs), self.rest


def _renewed(outputs: Tensors) -> Tensors:
    """Return `outputs` as tensors of their own: the next replay overwrites them."""
    given = [x for x in outputs if x is not None]
    if len(given) < 2:
        return [None if x is None else x.clone() for x in outputs]
    found = [None if x is None else torch.empty_like(x) for x in outputs]
    torch._foreach_copy_([x for x in found if x is not None], given)
    return found


def _can_be_replayed(first: torch.Tensor, dtype: torch.dtype, most: int) -> bool:
    return (
        first.is_cuda
        and 0 < first.numel() <= most
        and dtype in (torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and switches.graphs()
        and not torch.cuda.is_current_stream_capturing()
    )


def _kind(
    inputs: Inputs, tensors: Tensors, dtype: torch.dtype, settings: Key, most: int
) -> Key | None:
    """Return what a graph of this call depends on besides values, or None where it can be none.

    An address tells the device, too; those of the inputs are left to `_places`.
    """
    first: Any = inputs[0] if inputs else tensors[0]
    if not _can_be_replayed(first, dtype, most):
        return None
    types = tuple(map(type, tensors))
    if not (_PLAIN.issuperset(types) and _PLAIN.issuperset(map(type, inputs))):
        return None
    # whole passes in C: at 512 tokens this is a tenth of the host's time
    given = [x for x in tensors if x is not None]
    strides = None if all(map(_is_contiguous, given)) else tuple(x.stride() for x in given)
    here = first.get_device()
    stream = torch._C._cuda_getCurrentRawStream(here)
    inference = torch.is_inference_mode_enabled()
    shapes = [x.shape for x in inputs]
    return (
        first.shape, dtype, here, stream, inference, settings, types, strides,
        *shapes, *map(_address, given), *map(_dtype, given),
    )  # fmt: skip


def replayed(
    owner: Any,
    compute: Compute,
    inputs: Inputs,
    tensors: Tensors,
    dtype: torch.dtype,
    settings: Key,
    *,
    most: int = MOST_ELEMENTS,
    scratch: Shape | None = None,
    finish: Finish | None = None,
) -> tuple[Tensors, Any]:
    """Call `compute(*inputs, *tensors)`, from a thread's second call of a kind on by a CUDA graph.

    A kind is told by shapes, dtypes, the addresses of `tensors`, the device, the stream and
    `settings`: all but values, so whatever changes a parameter is seen. Long inputs, fp32 and fp64,
    other devices than CUDA, calls recorded for autograd and calls within a capture run as they are.

    Args:
        owner: the graphs live as long as this; None for a call that is never replayed.
        compute: launches on the current stream alone, waits for nothing, allocates with torch, and
            returns its outputs and what only `finish` reads. It sees `inputs` in `dtype` where they
            were copied.
        inputs: may lie elsewhere at each call, on the current device; then they are copied.
        tensors: what else it reads, or overwrites, where it lies.
        dtype: of the computation.
        settings: hashable values that change what `compute` does, the tensors' sizes among them.
        most: elements of the first input up to which a call is replayed.
        scratch: shape of a tensor in `dtype` that a replayed `compute` gets as `scratch`, to put
            what `finish` reads: all graphs of a stream share it.
        finish: is called with the rest of what `compute` returned, before anything overwrites that.

    Returns:
        The outputs, tensors of their own, and what `finish` returned, or None.
    """
    kind = None if owner is None else _kind(inputs, tensors, dtype, settings, most)
    if kind is not None:
        # numbers of threads are used again, an object is not while it is kept
        thread = _this_thread.__dict__.setdefault("mark", object())
        with _lock:  # a graph has one place for its outputs: nobody else may fill it meanwhile
            known = _known(owner, kind, thread, compute, inputs, tensors, dtype, scratch)
            if known is not None:
                outputs, rest = known(inputs)
                return outputs, finish and finish(*rest)
    outputs, rest = compute(*inputs, *tensors)
    return outputs, finish and finish(*rest)


def _known(
    owner: Any, kind: Key, thread: object, compute: Compute, inputs: Inputs, tensors: Tensors,
    dtype: torch.dtype, scratch: Shape | None,
) -> _Graph | None:  # fmt: skip
    """Return the graph of a call, captured now where it is due, or None for a launch."""
    kinds = _owners.get(owner)
    if kinds is None:
        kinds = _owners[owner] = OrderedDict()
    known, places = kinds.get(kind), _places(inputs)
    if type(known) is _Seen and known.thread is thread:
        moves = known.places != places
        known = kinds[kind] = _capture(compute, inputs, tensors, dtype, scratch, moves)
    if isinstance(known, _Graph) and (known.places is None or known.places == places):
        kinds.move_to_end(kind)
        return known
    if known is not _LAUNCHED:
        # a thread's first call makes its libraries' handles, which a capture forbids
        kinds[kind] = _Seen(thread, None if isinstance(known, _Graph) else places)
        kinds.move_to_end(kind)
        if len(kinds) > KEPT:
            kinds.popitem(last=False)
    return None


def _capture(
    compute: Compute, inputs: Inputs, tensors: Tensors, dtype: torch.dtype, scratch: Shape | None,
    moves: bool,
) -> _Graph | str:  # fmt: skip
    try:
        return _Graph(compute, inputs, tensors, dtype, scratch, moves)
    except RuntimeError as error:
        _log.warning("a call cannot become a CUDA graph, it is launched as it is: %s", error)
        # torch leaves the device's random numbers in a capture that fails: nobody could draw any
        first: Any = (*inputs, *tensors)[0]
        random = torch.cuda.default_generators[first.get_device()]
        random.graphsafe_set_state(random.clone_state())
        return _LAUNCHED
