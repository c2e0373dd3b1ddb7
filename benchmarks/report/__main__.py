"""Generate the pages of docs/results, their plots and README.md's table from the data.

    python -m benchmarks.report [--check]

--check changes nothing, and exits with 1 when the documents differ from the files in benchmarks.
Missed limits do not change the exit status: the documents list them.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from benchmarks.report import cards, kernels, layer, models, parallel, rivals
from benchmarks.report.documents import page, update
from quasar_kernels.arguments import Parser


def documents() -> dict[Path, str]:
    modules = (layer, kernels, models, cards, parallel, rivals)
    texts = {path: text for module in modules for path, text in module.documents().items()}
    for name in ("adaptive-layer", "delta-rule", "first-call", "kda", "layer"):
        texts |= page(name)
    return texts | page("claim", median=median)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    update(documents(), check=parser.parse_args().check)


if __name__ == "__main__":
    main()
