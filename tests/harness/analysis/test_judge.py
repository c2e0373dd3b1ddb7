"""Judging a tree without a claim: broken forks fail with a reason.

tests/scripts/test_local_validator.py judges a good tree and one that breaks rules.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis.judge import judge_tree
from quasar_kernels.contract import REQUIRED_IMPORTS, TARGET_FILES
from tests.harness.conftest import HONEST, write_tree
from tests.processes import HANG

OPERATOR, LAYER = "fla/ops/quasar/chunk.py", "fla/layers/quasar.py"


def wrapped(result: str) -> str:
    return (
        "\n_right = chunk_quasar\n"
        "def chunk_quasar(*args, **options):\n"
        "    o, state = _right(*args, **options)\n"
        f"    return {result}, state\n"
    )


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A fork that keeps the rules, with a small honest operator."""
    never = "if False:\n" + "".join(f"    {line}\n" for line in REQUIRED_IMPORTS)
    files = dict.fromkeys((f"fla/ops/quasar/{name}" for name in TARGET_FILES), "")
    files |= {OPERATOR: f"{HONEST}\n{never}", "fla/ops/quasar/kernel.cu": ""}
    return write_tree(tmp_path, files)


@pytest.mark.parametrize(
    ("file", "code", "failed", "reason"),
    [
        (OPERATOR, "\n# import fla.ops.gla\n", "imports", "is forbidden"),
        (LAYER, "\nimport no_such", "import", "which is not installed. Install"),
        (OPERATOR, wrapped("o * float('nan')"), "NaN and Inf", "not finite"),
        (OPERATOR, wrapped("o * 1.01"), "other checks", "relative RMS error"),
    ],
)
def test_a_broken_fork_fails_with_the_reason(fork, file, code, failed, reason):
    (fork / file).write_text((fork / file).read_text() + code)
    findings = judge_tree(fork, [512], device="cpu", timeout=HANG)
    wrong = {finding.name: finding.text for finding in findings if not finding.passed}
    assert reason in wrong[failed]
