"""The name of `harness.tune` in 0.2.0."""

import sys

if __name__ == "__main__":
    sys.exit(
        "harness.tuning was removed in 0.3.0: `python -m harness.tune` tunes the CUDA kernels."
    )
