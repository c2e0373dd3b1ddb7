"""A search of faster values of the kernels' constants: candidates, their trials, the comparison."""

from __future__ import annotations

import fcntl
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from harness.analysis.difference import Block, Difference, difference, take_block
from harness.constants import Constant
from harness.hardware.machine import Frozen
from harness.measuring.process import scratch_folder
from harness.measuring.runner import (
    CheckTree,
    Measure,
    MeasurementError,
    Options,
    check,
    measure,
    require_passed,
)
from harness.measuring.trees import whole_tree
from quasar_kernels.contract import copy_overlay

SAMPLES = 3
"""Number of times that a candidate is timed. It counts as faster if each of its speeds exceeds all
speeds of the best kernels so far; by chance, this is so for one in 20 equally fast candidates."""


class Trial(Frozen):
    """Kernels with changed constants, and their speeds over those of the first kernels."""

    changes: dict[str, float]
    ratios: tuple[float, ...] = ()
    refused: str = ""  # why they cannot be used

    def __str__(self) -> str:
        changes = ", ".join(f"{name} = {value:.10g}" for name, value in self.changes.items())
        speeds = ", ".join(f"{ratio - 1:+.2%}" for ratio in self.ratios)
        return f"{changes}: {speeds}{'; refused: ' * bool(self.refused)}{self.refused}"

    def beats(self, other: Trial) -> bool:
        """Return whether these kernels are faster in all samples."""
        whole = len(self.ratios) == SAMPLES and not self.refused
        return whole and min(self.ratios) > max(other.ratios)


@dataclass
class Gpu:
    """A GPU that tries candidates."""

    options: Options
    lock: Path  # a process that has it alone is timed
    speed: float = 0.0  # of the first kernels: the median, in tokens/s


@dataclass(kw_only=True)
class Search:
    """Tries changes of constants, the nearest values first, on GPUs of one model."""

    overlay: Path  # the first kernels
    length: int
    constants: Sequence[Constant]
    trials: list[Trial]
    keep: Callable[[Trial], object]  # called after each trial
    measure: Measure = measure
    check: CheckTree = check
    first: Trial = field(default_factory=lambda: Trial(changes={}))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _tried: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def best(self) -> Trial:
        """The first kernels, or the last ones that were faster than all before."""
        best = self.first
        for trial in self.trials:
            best = trial if trial.beats(best) else best
        return best

    def run(self, gpus: Sequence[Gpu], at_once: int, count: int, seconds: float) -> None:
        """Make up to `count` trials, the last one begun within `seconds`.

        Raises a MeasurementError if the first kernels cannot be timed.

        Args:
            at_once: processes of a GPU that import at the same time.
        """
        for constant in self.constants:
            constant.place(self.overlay)  # or a MissingConstantError
        until = time.monotonic() + seconds
        self._tried = [trial.changes for trial in self.trials]
        count += len(self._tried)

        def search(gpu: Gpu) -> None:
            while time.monotonic() < until:
                with self._lock:
                    changes = self._next() if len(self._tried) < count else None
                    if changes is None:
                        return
                    self._tried.append(changes)
                trial = self._try(changes, gpu)
                with self._lock:
                    self.trials.append(trial)
                    self.keep(trial)

        with self._workers(at_once * len(gpus)) as pool:
            first = [pool.map(self._speed_of_first, [gpu] * SAMPLES) for gpu in gpus]
            ratios: list[float] = []
            for gpu, running in zip(gpus, first, strict=True):
                speeds = list(running)
                gpu.speed = median(speeds)
                ratios += [speed / gpu.speed for speed in speeds]
            self.first = Trial(changes={}, ratios=tuple(ratios))
            list(pool.map(search, [*gpus] * at_once))

    def compare(
        self, changes: Mapping[str, float], gpu: Gpu, at_once: int, blocks: int
    ) -> Difference:
        """Return the speed of changed kernels (B) relative to the first ones (A).

        Several blocks run at once, as their processes are timed one by one. The order within each
        block is drawn independently, which is all that `difference` assumes.
        """

        with self.tree({}) as a, self.tree(changes) as b, self._workers(at_once) as pool:

            def block(_: int) -> Block:
                order = random.SystemRandom()
                return take_block(lambda: self._speed(a, gpu), lambda: self._speed(b, gpu), order)

            return difference(list(pool.map(block, range(blocks))))

    @contextmanager
    def _workers(self, number: int) -> Iterator[ThreadPoolExecutor]:
        """Yield a pool of threads; an error in the block ends their processes."""
        with ThreadPoolExecutor(number) as pool:
            try:
                yield pool
            except BaseException:  # includes Ctrl-C
                self._stop.set()
                raise

    def _next(self) -> dict[str, float] | None:
        """Return the next candidate: the best kernels' changes, with another value of one constant.

        Constants that were already improved come first, and of each constant the nearest values.
        """
        best, ranked = self.best.changes, []
        for constant in self.constants:
            name, present = str(constant), constant.value(self.overlay)
            for place, value in enumerate(constant.nearest(best.get(name, present))):
                changes = {**best, name: value}
                if value == present:
                    del changes[name]
                if changes and changes not in self._tried:
                    ranked.append((name not in best, place, changes))
        return min(ranked, key=lambda one: one[:2])[2] if ranked else None

    def _try(self, changes: Mapping[str, float], gpu: Gpu) -> Trial:
        ratios: list[float] = []
        try:
            with self.tree(changes) as tree:
                while len(ratios) < SAMPLES:
                    ratios.append(self._speed(tree, gpu) / gpu.speed)
                    if ratios[-1] <= max(self.best.ratios):
                        return Trial(changes=changes, ratios=tuple(ratios))
                with gpu.lock.open("a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    require_passed(self.check(tree, self.length, self._options(gpu)))
        except MeasurementError as error:
            if error.kind == "stopped":
                raise
            return Trial(changes=changes, ratios=tuple(ratios), refused=error.reason)
        return Trial(changes=changes, ratios=tuple(ratios))

    @contextmanager
    def tree(self, changes: Mapping[str, float]) -> Iterator[Path]:
        """Yield a whole tree with the kernels in which constants have other values."""
        with scratch_folder("tune-") as folder:
            copy_overlay(self.overlay, folder)
            write_changes(folder, self.constants, changes)
            with whole_tree(folder) as tree:
                yield tree

    def _speed_of_first(self, gpu: Gpu) -> float:
        with self.tree({}) as tree:
            return self._speed(tree, gpu)

    def _speed(self, tree: Path, gpu: Gpu) -> float:
        sample = self.measure(
            tree, self.length, self._options(gpu), cross_check=False, gpu_lock=gpu.lock
        )
        return sample.tokens_per_sec

    def _options(self, gpu: Gpu) -> Options:
        return replace(gpu.options, stop=self._stop)


def write_changes(
    overlay: Path, constants: Sequence[Constant], changes: Mapping[str, float]
) -> None:
    """Write the values of constants into an overlay."""
    for constant in constants:
        if str(constant) in changes:
            constant.write(overlay, changes[str(constant)])


def tune(
    search: Search, gpus: Sequence[Gpu], *, at_once: int, count: int, seconds: float, blocks: int
) -> tuple[Trial, Difference | None]:
    """Search; compare the best kernels with the first ones, and write them if they are faster.

    Returns:
        The best trial and its gain, or the first kernels and None if no candidate was faster. A
        trial without a gain in the comparison is refused from then on.
    """
    search.run(gpus, at_once, count, seconds)
    best = search.best
    if not best.changes:
        return best, None
    gain = search.compare(best.changes, gpus[0], at_once, blocks)
    if gain.faster:
        write_changes(search.overlay, search.constants, best.changes)
    else:
        refused = best.model_copy(update={"refused": f"compared: {gain}"})
        search.trials[search.trials.index(best)] = refused
        search.keep(refused)
    return best, gain
