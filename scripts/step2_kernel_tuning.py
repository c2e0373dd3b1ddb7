"""Search better constants of the kernels for this GPU: the same as `python -m harness.tune`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also without an installation

from harness.tune import main

if __name__ == "__main__":
    sys.exit(main())
