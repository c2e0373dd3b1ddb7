"""sanitize_kernels: what it makes of compute-sanitizer's words, with a stand-in for the tool."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import sanitized_calls
import torch
from measuring.operator_results import OperatorResults
from measuring.profile_sections import sanitizer
from measuring.results import load
from measuring.sanitizer_results import TOOLS, SanitizerResults, Watched, misses
from sanitize_kernels import SanitizerError, findings_in
from sanitized_calls import LAYER, LIMIT, OPERATOR, OperatorCase, wrong_cases

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "h200" / "operator.json"

STAND_IN = """\
#!/bin/sh
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || case "$*" in *--version*) ;; *) exit 3 ;; esac
for word in "$@"; do before=$what; what=$word; done
case "$what" in
  --version) echo "NVIDIA (R) Compute Sanitizer"; echo "Version 2025.3.1.0 (build 1)"; exit ;;
  *check) found=$PLANTED ;;
  handshake) found=$HANDSHAKE ;;
  layer) [ "$before" = operator ] && found=$((FOUND + LAYER)) && status=$STATUS ;;
  operator) found=$FOUND; status=$STATUS ;;
  *) exit 4 ;;
esac
echo "========= COMPUTE-SANITIZER watches the $what"
[ "$found" = none ] || echo "========= ERROR SUMMARY: $found errors"
[ "$found" = 0 ] || exit 9
exit "${status:-0}"
"""


def sanitize(
    folder: Path,
    planted: str,
    found: str,
    status: int,
    *options: str,
    handshake: str = "7",
    layer: str = "0",
) -> subprocess.CompletedProcess[str]:
    tool = folder / "compute-sanitizer"
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    environ = os.environ | {
        "PLANTED": planted, "FOUND": found, "STATUS": str(status), "HANDSHAKE": handshake,
        "LAYER": layer,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "scripts/sanitize_kernels.py", *options],
        cwd=ROOT,
        env=environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_clean_kernels_end_with_0_and_every_tool_is_named(tmp_path: Path) -> None:
    done = sanitize(tmp_path, "1", "0", 0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{tool}: 0 findings" for tool in TOOLS]


@pytest.mark.parametrize(
    ("planted", "found", "status", "said"),
    [
        ("1", "2", 9, "memcheck: 2 findings"),
        ("0", "0", 0, "memcheck does not find a planted fault here"),
        ("1", "0", 1, "the calls ended with status 1"),
        ("none", "0", 0, "gave no summary"),
    ],
)
def test_findings_a_blind_tool_and_wrong_calls_end_with_1(
    tmp_path: Path, planted: str, found: str, status: int, said: str
) -> None:
    done = sanitize(tmp_path, planted, found, status, "--tool", "memcheck")
    assert done.returncode == 1
    assert said in done.stdout


def test_racecheck_judges_the_layer_once_it_understands_its_handshake(tmp_path: Path) -> None:
    blind = sanitize(tmp_path, "1", "0", 0, "--tool", "racecheck", layer="4")
    assert (blind.returncode, blind.stdout) == (0, "racecheck: 0 findings\n")
    seeing = sanitize(tmp_path, "1", "0", 0, "--tool", "racecheck", handshake="0", layer="4")
    assert seeing.returncode == 1
    assert "racecheck: 4 findings" in seeing.stdout
    assert "watches the layer" in seeing.stdout
    for tool in ("memcheck", "initcheck"):
        assert sanitize(tmp_path, "1", "0", 0, "--tool", tool, layer="4").returncode == 1


def test_summaries_of_every_tool_are_read() -> None:
    race = "x\n========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n"
    assert findings_in(race) == 3
    assert findings_in("========= ERROR SUMMARY: 0 errors\n") == 0
    with pytest.raises(SanitizerError, match="no summary"):
        findings_in("ERROR SUMMARY: 0 errors, said by the program itself\n")


def test_wrong_results_are_named_nan_too() -> None:
    cases = (OperatorCase((1,)), OperatorCase((2,)), OperatorCase((3,)))
    errors = dict(zip(cases, (LIMIT, float("nan"), 2 * LIMIT), strict=True))
    wrong = wrong_cases(errors.__getitem__, cases)
    assert [line.partition(",)")[0] for line in wrong] == [
        "OperatorCase(lengths=(2",
        "OperatorCase(lengths=(3",
    ]


def test_the_calls_cover_ragged_packed_and_every_dtype() -> None:
    assert {case.dtype for case in OPERATOR} == {torch.bfloat16, torch.float16}
    assert any(length % 64 for case in OPERATOR for length in case.lengths)
    assert any(len(case.lengths) > 1 and 0 in case.lengths for case in OPERATOR)
    assert any(case.options == sanitized_calls.PORTABLE for case in OPERATOR)
    assert {case.gradients for case in LAYER} == {True, False}


def test_a_finding_and_a_tool_that_was_not_run_are_named() -> None:
    clean = Watched(calls=("operator", "layer"), findings=0, faulty=1)
    run = SanitizerResults(
        created=date(2026, 1, 1),
        commit=None,
        environment=load(OperatorResults, RESULTS).environment,
        sanitizer="2025.3",
        calls={"operator": len(OPERATOR), "layer": len(LAYER)},
        tools=dict.fromkeys(TOOLS, clean),
    )
    assert misses(run) == []
    found = clean.model_copy(update={"findings": 2})
    changed = run.model_copy(update={"tools": run.tools | {"racecheck": found}})
    assert misses(changed) == ["racecheck: 2 findings"]
    assert misses(run.model_copy(update={"tools": {}})) == [f"{tool} was not run" for tool in TOOLS]
    assert f"| racecheck | {len(OPERATOR)} of the operator" in sanitizer(changed)
