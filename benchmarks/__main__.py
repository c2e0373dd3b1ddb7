"""Measure one case: `python -m benchmarks CASE --out FILE`, where CASE is a file of `cases`.

`python -m benchmarks.report` generates the documents from the files.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.engine.commands import run_case

CASES = Path(__file__).with_name("cases")
REMOVED = {
    "claim_proof": "scripts/local_validator.py FORK --claim TOKENS_PER_SEC",
    "gpu_tests": "python -m pytest tests/gpu --junitxml FILE",
    "inference": "the requests of docs/inference.md",
    "learned_recall": "python -m quasar_kernels.blocks.language",
    "learned_text": "python -m quasar_kernels.blocks.language",
    "nsight": "Nsight Compute's command of docs/tuning-a-kernel.md",
    "recall": "python -m quasar_kernels.blocks.language",
    "sanitizer": "compute-sanitizer's command of docs/tuning-a-kernel.md",
    "wkv6": "python -m benchmarks mechanisms --only rwkv6 rwkv6-fla",
}
"""Replacements of the cases that existed in 0.2.0; version 0.4 removes this table."""


def descriptions() -> dict[str, str]:
    """Return the first docstring line of each case by its name, without importing the cases."""
    found = {}
    for path in sorted(CASES.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(x, ast.FunctionDef) and x.name == "measure" for x in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main() -> int:
    """Run a case, or list all cases; return the exit status."""
    name, *arguments = sys.argv[1:] or ["--help"]
    cases = descriptions()
    if name in cases:
        return run_case(import_module(f"benchmarks.cases.{name}"), arguments)
    if name in REMOVED:
        print(f"the case {name} was removed; use {REMOVED[name]}", file=sys.stderr)
        return 2
    known = "\n".join(f"  {case:18} {text}" for case, text in cases.items())
    usage = f"usage: python -m benchmarks CASE --out FILE [options]\n\n{known}"
    if name in ("-h", "--help"):
        print(usage)
        return 0
    print(f"there is no case {name}\n{usage}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
