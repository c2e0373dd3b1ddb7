"""The kernels' tunable constants, found and replaced in an overlay's source text.

The table has constants that the published layer reads at long targets on a GPU from compute
capability 8.0 on. Each may take any of its values without another change to the sources.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from quasar_kernels.contract import QUASAR_DIR


class MissingConstantError(Exception):
    """A constant of the table is not in the overlay, exactly once; the message names it."""


@dataclass(frozen=True)
class Constant:
    """A number in the overlay's sources, and the values that it may take."""

    file: str  # end of the file's path below QUASAR_DIR
    name: str
    values: tuple[float, ...]  # ascending; a whole number is written as such
    before: str = ""  # regular expression for the text between `NAME = ` and the number
    hopper: bool | None = None  # whether Hopper, or only other GPUs, read it; None: all do

    def __str__(self) -> str:
        """Return its name in a file of trials."""
        return f"{self.file}:{self.name}"

    def place(self, overlay: Path) -> tuple[Path, re.Match[str]]:
        """Return its file and the match of its number; raise a MissingConstantError."""
        number = re.compile(rf"\b{self.name} = {self.before}(\d+(?:\.\d+)?)(?! *<<)\b")
        paths = (overlay / QUASAR_DIR).rglob(self.file.rpartition("/")[2])
        files = [path for path in paths if path.as_posix().endswith(f"/{self.file}")]
        matches = [(path, match) for path in files for match in number.finditer(path.read_text())]
        if len(matches) != 1:
            raise MissingConstantError(
                f"{overlay} has {len(matches)} constants {self.name} in {self.file} instead of "
                "one. Correct TABLE in harness/constants.py, or restore the shipped source."
            )
        return matches[0]

    def value(self, overlay: Path) -> float:
        """Return the number in an overlay."""
        return float(self.place(overlay)[1][1])

    def write(self, overlay: Path, value: float) -> None:
        """Replace the number in an overlay."""
        path, match = self.place(overlay)
        start, stop = match.span(1)
        path.write_text(f"{match.string[:start]}{value:.10g}{match.string[stop:]}")

    def nearest(self, value: float) -> list[float]:
        """Return the other values, those of the smallest ratio to `value` first."""
        others = [other for other in self.values if other != value]
        return sorted(others, key=lambda other: abs(math.log(other / value)))


TABLE = (
    Constant("cuda/scan/scan_forward.py", "LONG", (1024, 2048, 3072, 4608, 6144, 12288)),
    Constant("cuda/scan/scan_forward.py", "EVEN", (0.75, 0.8, 0.86, 0.92, 0.96, 0.99)),
    Constant("segment_map.cu", "CHECK_EVERY", (1, 2, 3, 4, 6, 8, 16)),
    Constant("segment_map.cu", "MAP_BLOCKS", (3, 4, 5), r".*QUASAR_WGMMA \? ", hopper=True),
    Constant("segment_map.cu", "MAP_BLOCKS", (2, 3, 4), r".*QUASAR_WGMMA \? \d : ", hopper=False),
    Constant("segment_output.cu", "OUTPUT_BLOCKS", (3, 4, 5), r".*\? \(S == 64 \? ", hopper=True),
    Constant(
        "segment_output.cu", "OUTPUT_BLOCKS", (4, 5, 6, 7), r".*: \(S == 64 \? ", hopper=False
    ),
    Constant("scan_maps.cuh", "STAGES", (2, 3, 4, 5, 6)),
    Constant("projection.cu", "AHEAD", (1, 2, 3, 4, 6), hopper=True),
    Constant("projection.cu", "FLIGHT", (4, 8, 16), hopper=True),
    Constant("resident_tokens.cuh", "STAGES", (2, 3, 4), r"GROUPS == 1 \? \d : ", hopper=False),
)


def constants_for(capability: str) -> list[Constant]:
    """Return the constants that a GPU of this compute capability reads, such as 9.0."""
    if int(capability.partition(".")[0]) < 8:
        return []
    return [constant for constant in TABLE if constant.hopper in (None, capability == "9.0")]
