"""Records a measurement: the log, the report, and the progress file that `status` reads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from structlog.stdlib import BoundLogger

from harness.files import write_atomically
from harness.hardware.machine import Environment, Frozen
from harness.measuring.runner import MeasurementError
from harness.measuring.sampler import Recorder
from harness.report import build_report, write_report
from harness.sample import Failure, Sample
from harness.workload import WORKLOAD
from neurons.runtime.process import PROGRESS

REPORTS_KEPT = 200


class Length(Frozen):
    """The progress of one length."""

    length: int
    planned: int  # the number of samples in the plan so far
    speeds: tuple[float, ...]  # of the samples, in tokens/s


class Measuring(Frozen):
    """The running measurement."""

    began: float  # in Unix seconds
    lengths: tuple[Length, ...]


@dataclass
class ReportRecorder(Recorder):
    """Writes the log, the progress file, and after every round the report at `path`.

    As a context manager, it deletes the progress file at the end.
    """

    path: Path
    commit: str | None
    environment: Environment
    log: BoundLogger
    state_dir: Path
    _began: float = field(default_factory=time.time)
    _planned: Counter[int] = field(default_factory=Counter)
    _speeds: dict[int, list[float]] = field(default_factory=dict)

    def __enter__(self) -> None:
        self._began = time.time()

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            (self.state_dir / PROGRESS).unlink(missing_ok=True)

    def planned(self, samples: Sequence[Sample], missing: Sequence[int]) -> None:
        self._planned = Counter([*(sample.length for sample in samples), *missing])
        self._speeds = {length: [] for length in self._planned}
        for sample in samples:
            self._speeds[sample.length].append(sample.tokens_per_sec)
        for length in sorted(self._planned):
            if not self._speeds[length]:
                self.log.info("measuring", length=length)
        self._write_progress()

    def heated(self, result: object) -> None:
        self.log.info("the GPU is warm", soak=result)

    def accepted(self, sample: Sample, number: int) -> None:
        self.log.info(
            "measured",
            length=sample.length,
            run=number,
            tokens_per_sec=round(sample.tokens_per_sec),
            vram_mb=round(sample.vram_mb),
            first_call_seconds=round(sample.first_call_seconds, 2),
        )
        self._speeds[sample.length].append(sample.tokens_per_sec)
        self._write_progress()

    def rejected(self, sample: Sample, number: int, reason: str) -> None:
        self.log.warning("sample dropped", length=sample.length, attempt=number, reason=reason)

    def failed(self, length: int, error: MeasurementError) -> None:
        self.log.debug("end of the worker's output", log=error.log_tail)
        self.log.warning(
            "no claim for this length", length=length, kind=error.kind, reason=error.reason
        )

    def round_done(self, samples: Sequence[Sample], failures: Sequence[Failure]) -> None:
        ordered = sorted(samples, key=lambda sample: (sample.length, sample.started_at))
        protocol = WORKLOAD.describe(self.environment.device)
        write_report(self.path, build_report(protocol, self.commit, ordered, failures))
        newest = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in newest[:-REPORTS_KEPT]:
            old.unlink()

    def _write_progress(self) -> None:
        lengths = tuple(
            Length(length=n, planned=self._planned[n], speeds=tuple(self._speeds[n]))
            for n in sorted(self._planned)
        )
        with suppress(OSError):  # a full disk does not end the measurement
            measuring = Measuring(began=self._began, lengths=lengths)
            write_atomically(self.state_dir / PROGRESS, measuring.model_dump_json())


def progress_of(state_dir: Path) -> dict[str, str]:
    """Return how many samples of the running measurement are done, for a log line."""
    measuring = read_progress(state_dir)
    if measuring is None:
        return {}
    done = sum(len(one.speeds) for one in measuring.lengths)
    return {"samples": f"{done} of {sum(one.planned for one in measuring.lengths)}"}


def read_progress(state_dir: Path) -> Measuring | None:
    """Return the progress that the lock's holder wrote; the caller checks that there is a holder.

    Each process that takes the lock removes the file of an earlier one.
    """
    try:
        return Measuring.model_validate_json((state_dir / PROGRESS).read_bytes())
    except (OSError, ValidationError):
        return None
