"""Progress of a measurement, in the state folder for `status` while it runs."""

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
        length: in tokens.
        planned: samples that it takes; noise may require more.
        speeds: of the accepted samples so far, in tokens/s.
    """

    model_config = ConfigDict(frozen=True)

    length: int
    planned: int
    speeds: tuple[float, ...]


class Measuring(BaseModel):
    """The measurement that a process is making; `began` in Unix seconds."""

    model_config = ConfigDict(frozen=True)

    began: float
    lengths: tuple[Length, ...]


class ProgressFile:
    """The file that a measuring process writes; a reader sees the old content or the new one."""

    def __init__(self, state_dir: Path) -> None:
        self._path, self._began = state_dir / PROGRESS, time.time()
        self._planned = Counter[int]()
        self._speeds: dict[int, list[float]] = {}

    def plan(self, samples: Sequence[Sample], missing: Sequence[int]) -> None:
        """Show the samples so far and, by length, the missing ones."""
        self._planned = Counter([*(sample.length for sample in samples), *missing])
        self._speeds = {length: [] for length in self._planned}
        for sample in samples:
            self._speeds[sample.length].append(sample.tokens_per_sec)
        self._write()

    def add(self, sample: Sample) -> None:
        """Show one more sample of a planned length."""
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

    Each new holder of the lock removes the file of an earlier one, so the file is only ever the
    present holder's. The caller checks that there is a holder.
    """
    try:
        return Measuring.model_validate_json((state_dir / PROGRESS).read_bytes())
    except (OSError, ValidationError):
        return None
