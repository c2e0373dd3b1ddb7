"""Generate the pages of docs/results, their plots and README.md's table from the data.

    python -m benchmarks.report [--check]

--check changes nothing, and exits with 1 when the documents differ from the files in benchmarks.
Missed limits, failed tests and findings of the sanitizer stop nothing: the documents list them.
"""

from __future__ import annotations

import argparse

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

PAGES = (layer, kernels, recall, claim, delta_rule, models, inference, cards, parallel)


def main() -> None:
    """Write the documents, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    wanted = {path: text for page in PAGES for path, text in page.documents().items()}
    update(wanted, check=args.check)


if __name__ == "__main__":
    main()
