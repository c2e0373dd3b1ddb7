"""The import check agrees with the public validator's for many spellings of imports.

public_imports.json has a line for each spelling, common, unusual or random: the text, and the names
that the public validator misses. With QUASAR_LIVE_SUBNET, a checkout of the public subnet, its code
runs again and is compared with the file. After a new text, with an empty list of names,
`python -m tests.quasar_kernels.test_public_imports CHECKOUT` writes the names.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quasar_kernels.contract import PUBLICLY_REQUIRED, QUASAR_DIR, TARGET_FILES, publicly_missing

RECORDED = Path(__file__).with_name("public_imports.json")
SUBNET = "QUASAR_LIVE_SUBNET"

Check = Callable[[str], list[str]]


def public_check(subnet: Path) -> Check:
    """Return the public validator's check of a chunk.py, extracted from its source."""
    source = (subnet / "neurons/validator.py").read_text()
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "PerformanceValidator"
    )
    kept = (ast.Assign, ast.Expr)
    found.body = [
        node
        for node in found.body
        if isinstance(node, kept)
        or (isinstance(node, ast.FunctionDef) and node.name == "validate_imports")
    ]
    names: dict[str, Any] = {"os": os, "List": list}
    exec(compile(ast.Module([found], []), "validator.py", "exec"), names)  # noqa: S102
    validator = object.__new__(names["PerformanceValidator"])

    def check(text: str) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            quasar = Path(folder) / QUASAR_DIR
            quasar.mkdir(parents=True)
            for name in TARGET_FILES:
                (quasar / name).write_text(text if name == "chunk.py" else "")
            _, errors = validator.validate_imports(folder)
        return sorted(error.rpartition(" ")[2] for error in errors)

    return check


def test_the_check_agrees_with_the_recorded_results() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert {len(missing) for _, missing in recorded} >= {0, len(PUBLICLY_REQUIRED)}
    for text, missing in recorded:
        assert sorted(publicly_missing(text)) == missing, text


@pytest.mark.live
@pytest.mark.skipif(not os.environ.get(SUBNET), reason=f"needs {SUBNET}")
def test_the_public_code_agrees_with_the_recorded_results() -> None:
    check = public_check(Path(os.environ[SUBNET]))
    for text, missing in json.loads(RECORDED.read_text()):
        assert check(text) == missing, text


if __name__ == "__main__":
    public = public_check(Path(sys.argv[1]))
    rows = [json.dumps([text, public(text)]) for text, _ in json.loads(RECORDED.read_text())]
    RECORDED.write_text("[\n" + ",\n".join(rows) + "\n]\n")
