"""Search the tiles of the Triton kernels for this GPU: the same as `python -m harness.tuning`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installation

from harness.tuning.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
