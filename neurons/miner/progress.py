"""The progress of a running measurement, in a file of the state folder for `status`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.files import write_atomically
from harness.sample import Sample
from neurons.runtime.process import PROGRESS


class Length(BaseModel):
    """The samples of one length.

    Attributes:
        length: the length in tokens.
        planned: the number of samples in the plan; noise may require more.
        speeds: the speeds of the accepted samples so far, in tokens/s.
    """

    model_config = ConfigDict(frozen=True)

    length: int
    planned: int
    speeds: tuple[float, ...]


class Measuring(BaseModel):
    """The running measurement; `began` is in Unix seconds."""

    model_config = ConfigDict(frozen=True)

    began: float
    lengths: tuple[Length, ...]


class ProgressFile:
    """The progress file of a measuring process, which is written atomically."""

    def __init__(self, state_dir: Path) -> None:
        self._path, self._began = state_dir / PROGRESS, time.time()
        self._planned = Counter[int]()
        self._speeds: dict[int, list[float]] = {}

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

    def remove(self) -> None:
        """Remove the file: the measurement has ended."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_progress(state_dir: Path) -> Measuring | None:
    """Return the measurement of the process that holds the state folder's lock; None without one.

    Each process that takes the lock removes an earlier file, so the file belongs to the lock's
    holder. The caller must check that the lock is held.
    """
    try:
        return Measuring.model_validate_json((state_dir / PROGRESS).read_bytes())
    except (OSError, ValidationError):
        return None
