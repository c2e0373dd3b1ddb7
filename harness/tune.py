"""Search better constants of the CUDA kernels for this GPU, and prove the gain.

    python -m harness.tune [--overlay DIR] [--target TOKENS] [--trials N] [--seconds N] [--gpus N]

A trial changes one constant of the best kernels so far (harness/constants.py lists them), and times
the layer at the target in fresh processes, as a validator does. Kernels that are faster must pass
the correctness check. Finally the best kernels (B) are compared with the first ones (A) in blocks
of A, B and A again. DIR receives the constants only if the gain exceeds the difference of A and A.
DIR is made from the shipped kernels if it does not exist. Each trial is stored in a file, from
which the next run continues.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from harness.analysis.ab_compare import BLOCKS
from harness.analysis.difference import MIN_BLOCKS, Block, Difference, difference, take_block
from harness.constants import Constant, MissingConstantError, constants_for
from harness.files import write_atomically
from harness.hardware.machine import Environment, EqualGpus, Frozen
from harness.measuring.process import scratch_folder
from harness.measuring.runner import (
    CheckTree,
    Measure,
    MeasurementError,
    Options,
    call,
    check,
    measure,
    probe,
    require_passed,
)
from harness.measuring.sampler import processes_at_once
from harness.measuring.trees import whole_tree
from harness.terminal import Progress, ends_quietly
from quasar_kernels.arguments import output_file, positive
from quasar_kernels.contract import OVERLAY, copy_overlay, overlay_digest

SAMPLES = 3
"""Times that a faster candidate is timed: each must exceed all of the best kernels so far, which
happens to equal code once in 20 times."""
MAX_IMPORTS = 8
"""Processes per GPU that import at the same time; they are timed one by one."""
VARIABLES = {"AGENT_ITERATIONS": "20", "TARGET_SEQUENCE_LENGTH": "1000000"}
"""The daemon sets them; other values, such as auto, are replaced by these."""
EX_CONFIG = 78


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


class Trials(Frozen):
    """The file of trials. Those of other kernels, lengths or machines are not continued."""

    overlay: str  # the first kernels' digest
    length: int
    environment: Environment
    trials: tuple[Trial, ...] = ()


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
        """Return the changes of the next candidate: the best ones' with another value of one.

        Constants that have already been improved come first, then the nearest values.
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


def earlier_trials(path: Path, new: Trials) -> list[Trial]:
    """Return the trials of a file that continues `new`; none of other kernels or machines."""
    try:
        stored = Trials.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return []
    return list(stored.trials) if stored.model_copy(update={"trials": ()}) == new else []


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


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; the daemon's AGENT_ITERATIONS and target replace the defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    given = {name: os.environ.get(name, "").lstrip("0") for name in VARIABLES}
    trials, target = (text if text.isdecimal() else VARIABLES[name] for name, text in given.items())
    parser.add_argument(
        "--overlay",
        type=Path,
        default=Path("tuned-overlay"),
        help="kernels to improve (tuned-overlay, at first a copy of the shipped ones)",
    )
    parser.add_argument("--target", type=positive, default=target, help=f"in tokens ({target})")
    parser.add_argument("--trials", type=positive, default=trials, help=f"of this run ({trials})")
    parser.add_argument("--seconds", type=float, default=600.0, help="for the trials (600)")
    parser.add_argument("--gpus", type=positive, default=1, help="of the first one's model (1)")
    parser.add_argument("--storage", type=output_file, default="trials.json", help="(trials.json)")
    parser.add_argument(
        "--blocks", type=positive, default=BLOCKS, help=f"of the comparison ({BLOCKS})"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a process (120)")
    arguments = parser.parse_args(argv)
    if arguments.blocks < MIN_BLOCKS:
        parser.error(f"--blocks must be at least {MIN_BLOCKS}")
    return arguments


def find_gpus(count: int, options: Options, folder: Path) -> list[Gpu]:
    """Return up to `count` visible GPUs of the first one's model; `folder` is for their locks."""
    if count == 1:
        return [Gpu(options, folder / "lock")]
    found = call("harness.worker.machine.environment:equal_gpus", options=options)
    return [
        Gpu(replace(options, gpu=uuid), folder / uuid)
        for uuid in EqualGpus.model_validate(found).uuids[:count]
    ]


@ends_quietly
def main(argv: Sequence[str] | None = None) -> int:
    """Tune the kernels by a command line; return the exit status."""
    arguments, progress = parse(argv), Progress()
    options = Options("auto", arguments.timeout)
    try:
        environment = probe(options)
        constants = constants_for(environment.compute_capability or "0")
        if not constants:
            progress.print(
                f"{environment.gpu or 'a CPU'} does not run the tuned kernels: they "
                "need an NVIDIA GPU of compute capability 8.0 or newer."
            )
            return EX_CONFIG
        if not arguments.overlay.exists():
            copy_overlay(OVERLAY, arguments.overlay)
        new = Trials(
            overlay=overlay_digest(root=arguments.overlay),
            length=arguments.target,
            environment=environment,
        )

        def keep(trial: Trial) -> None:
            progress.print(str(trial))
            stored = new.model_copy(update={"trials": tuple(search.trials)})
            write_atomically(arguments.storage, stored.model_dump_json(indent=1) + "\n")

        search = Search(
            overlay=arguments.overlay,
            length=arguments.target,
            constants=constants,
            trials=earlier_trials(arguments.storage, new),
            keep=keep,
        )
        progress.print(f"{environment.gpu}, {arguments.target:,} tokens")
        progress.print(f"{len(search.trials)} earlier trials in {arguments.storage}")
        with scratch_folder("tune-") as folder:
            gpus = find_gpus(arguments.gpus, options, folder)
            best, gain = tune(
                search,
                gpus,
                at_once=max(1, min(MAX_IMPORTS, processes_at_once(environment) // len(gpus))),
                count=arguments.trials,
                seconds=arguments.seconds,
                blocks=arguments.blocks,
            )
    except MissingConstantError as error:
        progress.print(str(error))
        return EX_CONFIG
    except MeasurementError as error:
        progress.print(error.explain())
        return 1
    except OSError as error:
        progress.print(
            f"{error.filename or arguments.storage}: {error.strerror}. Free some space, "
            "or name other files by --overlay and --storage."
        )
        return 1
    if gain is None:
        sys.stdout.write("no gain: no candidate was faster in all its samples\n")
    elif not gain.faster:
        sys.stdout.write(f"no gain: A is the first kernels, B {best}. {gain}\n")
    else:
        sys.stdout.write(f"written to {arguments.overlay}: B is {best}. {gain}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
