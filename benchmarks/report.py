"""Make README.md's table, docs/benchmarks.md, docs/kernels.md and their plots from the data.

    python -m benchmarks.report [--check]

--check changes nothing, and exits with 1 when the documents do not say what the files in
benchmarks/h200 say. A figure of the operator outside of its limit, or what the sanitizer found, is
named and makes the status 1, too, once the documents are written; limits of the layer are shown met
or missed in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.documents import update
from benchmarks.layer import page as layer
from benchmarks.operator import page as operator


def main() -> None:
    """Write the documents, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    runs = operator.load_runs()
    wanted = layer.documents() | operator.documents(runs)
    update(wanted, check=args.check, command="python -m benchmarks.report")
    if missed := operator.outside(runs):
        sys.exit("figures outside of their limits:\n" + "\n".join(missed))


if __name__ == "__main__":
    main()
