"""`python neurons/miner.py`, as in the public subnet's guide: runs START_MINER.sh."""

import os
import sys
from pathlib import Path

script = str(Path(__file__).resolve().parents[1] / "START_MINER.sh")
os.execv(script, [script, *sys.argv[1:]])  # noqa: S606
