"""The kernels that are published: the shipped ones, or those that were tuned on this machine."""

from __future__ import annotations

import shutil
import tempfile
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.files import write_atomically
from quasar_kernels.contract import OVERLAY, Scope, overlay_digest, overlay_files

FOLDER, FILE = "tuned", "tuned.json"


class Evidence(BaseModel):
    """The comparison for which tuned kernels are published.

    Attributes:
        shipped: the digest of the shipped kernels at the time of the search; if an update of the
            program changes these, the tuned kernels are no longer used.
        overlay: the digest of the tuned kernels, which is also their folder's name.
        proposed_by: the command that proposed them.
        gpu: the GPU that timed them; None for a CPU.
        length: the length in tokens of the timed sequences.
        pairs: blocks of three processes in which both overlays were timed.
        ratio, low, high: the speed of the tuned kernels divided by the speed of the earlier ones,
            and the bounds of the ratio's 99% interval.
        at: the time in UTC at which they were accepted.
    """

    model_config = ConfigDict(frozen=True)

    shipped: str
    overlay: str
    proposed_by: tuple[str, ...]
    gpu: str | None
    length: int
    pairs: int
    ratio: float
    low: float
    high: float
    at: datetime


class TunedKernels:
    """The tuned kernels in a state folder, if there are any.

    A crash while new ones are written leaves the earlier ones in use.
    """

    def __init__(self, state_dir: Path, scope: Scope = "layer") -> None:
        self.folder, self._scope = state_dir / FOLDER, scope

    def evidence(self) -> Evidence | None:
        """Return the evidence for the tuned kernels; None if the shipped ones are published."""
        try:
            evidence = Evidence.model_validate_json((self.folder / FILE).read_bytes())
        except (OSError, ValidationError):
            return None
        root = self.folder / evidence.overlay
        sound = root.is_dir() and overlay_digest(root=root) == evidence.overlay
        return evidence if sound and evidence.shipped == overlay_digest() else None

    def root(self) -> Path:
        """Return the folder of the kernels that are published."""
        evidence = self.evidence()
        return OVERLAY if evidence is None else self.folder / evidence.overlay

    def digest(self) -> str:
        """Return the digest of the published content."""
        return overlay_digest(self._scope, self.root())

    def take(self, overlay: Path, evidence: Evidence) -> None:
        """Publish the kernels in the folder `overlay` from now on; it is copied.

        Raises:
            OSError: the state folder accepts no more data; earlier files stay.
        """
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


def copy_overlay(root: Path, target: Path) -> None:
    """Copy the files of the overlay at `root`, and no other files, to `target`."""
    for name in overlay_files(root=root):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target / name)
