"""The kernels that are published: the shipped ones, or kernels that were tuned on this machine."""

from __future__ import annotations

import shutil
import tempfile
from datetime import datetime
from pathlib import Path

from pydantic import ValidationError

from harness.files import write_atomically
from harness.hardware.machine import Frozen
from quasar_kernels.contract import OVERLAY, Scope, copy_overlay, overlay_digest

FOLDER, FILE = "tuned", "tuned.json"


class Evidence(Frozen):
    """The comparison that justifies publishing tuned kernels."""

    # digest of the shipped kernels; when an update changes it, the tuned kernels are no longer used
    shipped: str
    overlay: str  # digest of the tuned kernels
    proposed_by: tuple[str, ...]  # the command
    gpu: str | None  # the GPU that timed them; None for a CPU
    length: int  # the length in tokens of the timed sequences
    pairs: int  # blocks of three processes in which both overlays were timed
    ratio: float  # speed of the tuned kernels divided by that of the earlier ones
    low: float  # low, high: the bounds of the ratio's 99% interval
    high: float
    at: datetime  # the time in UTC at which they were accepted


class TunedKernels:
    """The tuned kernels in a state folder; a crash during `publish` leaves the earlier ones."""

    def __init__(self, state_dir: Path, scope: Scope = "layer") -> None:
        self.folder, self._scope = state_dir / FOLDER, scope

    def evidence(self) -> Evidence | None:
        """Return the evidence for the tuned kernels; None if the shipped ones are published.

        Damaged kernels, and those tuned against other shipped ones, are not published.
        """
        try:
            evidence = Evidence.model_validate_json((self.folder / FILE).read_bytes())
        except (OSError, ValidationError):
            return None
        root = self.folder / evidence.overlay
        sound = root.is_dir() and overlay_digest(root=root) == evidence.overlay
        return evidence if sound and evidence.shipped == overlay_digest() else None

    def root(self) -> Path:
        evidence = self.evidence()
        return OVERLAY if evidence is None else self.folder / evidence.overlay

    def digest(self) -> str:
        return overlay_digest(self._scope, self.root())

    def publish(self, overlay: Path, evidence: Evidence) -> None:
        """Publish a copy of these kernels from now on; after an OSError the earlier ones stay."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = self.folder / evidence.overlay
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                copy_overlay(overlay, Path(scratch, "overlay"))
                Path(scratch, "overlay").rename(target)
        write_atomically(self.folder / FILE, evidence.model_dump_json(indent=1) + "\n")
        for other in self.folder.iterdir():
            if other.is_dir() and other != target:
                shutil.rmtree(other)
