"""The progress of a running measurement, in a file of the state folder for `status`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from harness.files import write_atomically
from harness.hardware.machine import Frozen
from harness.sample import Sample
from neurons.runtime.process import PROGRESS


class Length(Frozen):
    """The progress of one length."""

    length: int
    planned: int  # the number of samples in the plan so far
    speeds: tuple[float, ...]  # of the samples, in tokens/s


class Measuring(Frozen):
    """The running measurement."""

    began: float  # in Unix seconds
    lengths: tuple[Length, ...]


class ProgressFile:
    """The progress file of a measuring process; as a context manager, it ends without a file."""

    def __init__(self, state_dir: Path) -> None:
        self._path, self._began = state_dir / PROGRESS, time.time()
        self._planned = Counter[int]()
        self._speeds: dict[int, list[float]] = {}

    def __enter__(self) -> None:
        self._began = time.time()

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def plan(self, samples: Sequence[Sample], missing: Sequence[int]) -> None:
        """Write the samples so far and the missing ones by length."""
        self._planned = Counter([*(sample.length for sample in samples), *missing])
        self._speeds = {length: [] for length in self._planned}
        for sample in samples:
            self._speeds[sample.length].append(sample.tokens_per_sec)
        self._write()

    def add(self, sample: Sample) -> None:
        """Write a further sample of a planned length."""
        self._speeds[sample.length].append(sample.tokens_per_sec)
        self._write()

    def _write(self) -> None:
        lengths = tuple(
            Length(length=n, planned=self._planned[n], speeds=tuple(self._speeds[n]))
            for n in sorted(self._planned)
        )
        with suppress(OSError):  # a full disk does not end the measurement
            measuring = Measuring(began=self._began, lengths=lengths)
            write_atomically(self._path, measuring.model_dump_json())


def read_progress(state_dir: Path) -> Measuring | None:
    """Return the measurement of the lock's holder; the caller checks that it is held.

    Each process that takes the lock removes an earlier file.
    """
    try:
        return Measuring.model_validate_json((state_dir / PROGRESS).read_bytes())
    except (OSError, ValidationError):
        return None
