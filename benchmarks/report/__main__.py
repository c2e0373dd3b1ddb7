"""Make the pages of docs/results, their plots and README.md's table from the data.

    python -m benchmarks.report [--check]

--check changes nothing, and exits with 1 when the documents do not say what the files in
benchmarks say. A limit that is missed, a test that failed or what the sanitizer found stops
nothing: the documents list it, and this says it.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.delta_rule import page as delta_rule
from benchmarks.engine.limits import missed
from benchmarks.honesty import page as honesty
from benchmarks.inference import page as inference
from benchmarks.layer import page as layer
from benchmarks.mechanisms import page as mechanisms
from benchmarks.operator import page as operator
from benchmarks.recall import page as recall
from benchmarks.report.documents import update


def main() -> None:
    """Write the documents, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    of_layer, of_operator = layer.load_runs(), operator.load_runs()
    wanted = {
        **layer.documents(of_layer),
        **operator.documents(of_operator),
        **recall.documents(),
        **honesty.documents(),
        **delta_rule.documents(),
        **mechanisms.documents(),
        **inference.documents(),
    }
    update(wanted, check=args.check, command="python -m benchmarks.report")
    for line in (
        *missed(layer.limits(of_layer)),
        *operator.outside(of_operator),
        *missed(honesty.limits()),
        *missed(inference.limits()),
    ):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
