"""Generate the pages of docs/results, their plots and README.md's table from the data.

    python -m benchmarks.report [--check]

--check changes nothing, and exits with 1 when the documents differ from the files in benchmarks.
Missed limits, failed tests and findings of the sanitizer stop nothing: the documents list them, and
this prints them.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.report import (
    cards,
    claim,
    delta_rule,
    inference,
    kernels,
    layer,
    models,
    parallel,
    recall,
)
from benchmarks.report.documents import update


def main() -> None:
    """Write the documents, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    wanted = {
        **layer.documents(layer.load_runs()),
        **kernels.documents(),
        **recall.documents(),
        **claim.documents(),
        **delta_rule.documents(),
        **models.documents(),
        **inference.documents(),
        **cards.documents(),
        **parallel.documents(),
    }
    update(wanted, check=args.check, command="python -m benchmarks.report")
    for page in (layer, kernels, claim, inference, parallel):
        for line in page.misses():
            print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
