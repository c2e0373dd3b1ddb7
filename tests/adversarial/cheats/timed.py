"""Layers that pass the correctness check and cheat in timed calls."""

import sys
import time

import torch

from . import honest

calls = 0


class Counting(honest.QuasarAttention):
    def forward(self, x, **options):
        global calls
        calls += 1
        return super().forward(x, **options)


class RestsWhileTimed(Counting):
    """Counts calls, and does nothing in the ten timed ones."""

    def forward(self, x, **options):
        result = super().forward(x, **options) if not 3 <= calls < 13 else None
        if result is None:
            globals()["calls"] += 1
            return torch.zeros_like(x), None, None
        return result


class RemembersByVersion(Counting):
    """From the fourth call with the same tensor and version counter on, repeats its last output."""

    def forward(self, x, **options):
        key = (id(x), x._version)
        calls_of = self.__dict__.setdefault("calls_of", {})
        calls_of[key] = calls_of.get(key, 0) + 1
        if calls_of[key] > 3:
            return self.__dict__["kept"]
        self.__dict__["kept"] = super().forward(x, **options)
        return self.__dict__["kept"]


class RemembersByContent(Counting):
    """Repeats its output if the sums of input and weights are the same."""

    def forward(self, x, **options):
        key = (float(x.sum()), *(float(p.sum()) for p in self.parameters()))
        kept = self.__dict__.setdefault("kept", {})
        if key not in kept:
            kept[key] = super().forward(x, **options)
        return kept[key]


class ComputesOnlyTheBeginning(honest.QuasarAttention):
    """Computes only the first 257 tokens."""

    def forward(self, x, **options):
        if x.shape[1] <= 257:
            return super().forward(x, **options)
        y = torch.zeros_like(x)
        y[:, :257] = super().forward(x[:, :257], **options)[0]
        return y, None, None


class ZeroesAChunk(honest.QuasarAttention):
    """Sets a chunk of the output to zero after two correct calls."""

    def forward(self, x, **options):
        self.__dict__["number"] = self.__dict__.get("number", 0) + 1
        y, *rest = super().forward(x, **options)
        if self.__dict__["number"] > 2:
            y = y.clone()
            y[:, 64:128] = 0
        return y, *rest


class KnowsItsProcess(honest.QuasarAttention):
    """Recognises the timing process by its arguments."""

    def forward(self, x, **options):
        if sys.argv[-1] == "time":
            y, *rest = super().forward(x, **options)
            return y * 0.5, *rest
        return super().forward(x, **options)


class Lazy(torch.Tensor):
    """An output that is computed when it is read."""

    @staticmethod
    def __new__(cls, like, compute):
        made = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        made.compute = compute
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0], args[0].compute)
        real = torch.utils._pytree.tree_map_only(cls, lambda lazy: lazy.compute(), args)
        return function(*real, **(kwargs or {}))


class ComputesWhenRead(honest.QuasarAttention):
    def forward(self, x, **options):
        return Lazy(x, lambda: super(ComputesWhenRead, self).forward(x, **options)[0]), None, None


class PatchesTheClock(honest.QuasarAttention):
    def forward(self, x, **options):
        time.time = lambda: 0.0
        return super().forward(x, **options)


class PatchesSynchronize(honest.QuasarAttention):
    def forward(self, x, **options):
        torch.cuda.synchronize = lambda *_: None
        return super().forward(x, **options)


class ForgesItsTime(honest.QuasarAttention):
    """Replaces the subject's function that reports the time."""

    def __init_subclass__(cls):
        from harness.worker.subject import serve

        true = serve.InProcessSubject.time
        serve.InProcessSubject.time = lambda self, length: {
            **true(self, length),
            "elapsed_seconds": 1e-6,
        }


class ReusesOutputsByAddress(honest.QuasarAttention):
    """After three calls on an address, returns the last output, scaled."""

    def forward(self, x, **options):
        seen = self.__dict__.setdefault("seen", {})
        if x.data_ptr() in seen and seen[x.data_ptr()][0] > 2:
            seen[x.data_ptr()][0] += 1
            return seen[x.data_ptr()][1] * 1.01, None, None
        y = super().forward(x, **options)[0]
        seen[x.data_ptr()] = [seen.get(x.data_ptr(), [0])[0] + 1, y]
        return y, None, None
