"""`python neurons/validator.py`, as in the public subnet's guide: runs START_VALIDATOR.sh."""

import os
import sys
from pathlib import Path

script = str(Path(__file__).resolve().parents[1] / "START_VALIDATOR.sh")
os.execv(script, [script, *sys.argv[1:]])  # noqa: S606
