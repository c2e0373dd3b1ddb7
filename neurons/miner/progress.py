"""How far a measurement is: published in the state folder for `status`, while it runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from neurons.runtime.process import PROGRESS, write_atomically


class Length(BaseModel):
    """The runs of one length.

    Attributes:
        length: in tokens.
        planned: runs that it takes as far as is known; noise may ask for more.
        speeds: of the accepted runs so far, in tokens/s.
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

    def publish(self, planned: Mapping[int, int], speeds: Mapping[int, Sequence[float]]) -> None:
        """Write the numbers of planned runs and the accepted speeds, by length.

        A disk that takes nothing does not end the measurement.
        """
        lengths = tuple(
            Length(length=n, planned=planned.get(n, 0), speeds=tuple(speeds.get(n, ())))
            for n in sorted({*planned, *speeds})
        )
        with suppress(OSError):
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
