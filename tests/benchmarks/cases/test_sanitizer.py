"""The case sanitizer with a fake compute-sanitizer: its output, findings and exit status."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.cases.sanitizer import MISREPORTED, TESTS, TOOLS, findings_in
from tests import PROJECT
from tests.processes import HANG

FAKE = """\
#!/bin/sh
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING$QUASAR_GRAPHS" = 10 ] ||
  case "$*" in *--version*) ;; *) exit 3 ;; esac
for what in "$@"; do :; done
case "$what" in
  --version) echo "NVIDIA (R) Compute Sanitizer"; echo "Version 2025.3.1.0 (build 1)"; exit ;;
  *check) found=$PLANTED ;;
  handshake) found=$HANDSHAKE ;;
  */hopper) found=$LAYER ;;
  */portable) found=0 ;;
  */scan) found=$FOUND; status=$STATUS ;;
  *) exit 4 ;;
esac
echo "========= COMPUTE-SANITIZER watches $what"
[ "$found" = stuck ] && exec sleep 3600
[ "$found" = none ] || echo "========= ERROR SUMMARY: $found errors"
[ "$found" = 0 ] || exit 9
exit "${status:-0}"
"""


OUTPUTS = {"PLANTED": "1", "FOUND": "0", "STATUS": "0", "HANDSHAKE": "7", "LAYER": "0"}
Sanitize = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sanitize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sanitize:
    """Return a function that runs the case with a fake tool: exit status, output, progress."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(*options: str, **outputs: str) -> tuple[int, str, str]:
        for name, value in (OUTPUTS | outputs).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["benchmarks", "sanitizer", *options])
        return main(), *capsys.readouterr()

    return run


def test_clean_kernels_end_with_0_and_every_tool_is_named(sanitize: Sanitize) -> None:
    status, out, progress = sanitize()
    assert (status, out) == (0, ""), out + progress
    assert all(f"tools, {tool}: findings 0" in progress for tool in TOOLS)


@pytest.mark.parametrize(
    ("outputs", "line"),
    [
        ({"FOUND": "2", "LAYER": "1"}, "memcheck: 3 findings"),
        ({"PLANTED": "0"}, "memcheck: a planted fault was not found"),
        ({"PLANTED": "none"}, "memcheck: a planted fault was not found"),
        ({"STATUS": "1"}, "memcheck: tests/gpu/cuda/scan ended with status 1"),
        ({"LAYER": "none"}, f"memcheck: {MISREPORTED} gave no summary"),
        ({"LAYER": "stuck"}, f"memcheck: {MISREPORTED} was cut off after 5 s"),
    ],
)
def test_findings_and_failures_end_with_1(sanitize, outputs, line):
    limit = "5" if "stuck" in outputs.values() else f"{HANG:.0f}"
    status, out, _ = sanitize("--tool", "memcheck", "--limit", limit, **outputs)
    assert status == 1
    assert line in out
    assert "memcheck: 0 findings" not in out
    assert f"watches {MISREPORTED}" in out


def test_racecheck_checks_hopper_if_it_accepts_the_correct_handshake(sanitize: Sanitize) -> None:
    status, out, progress = sanitize("--tool", "racecheck", LAYER="4")
    assert (status, out) == (0, ""), out + progress
    assert "tools, racecheck: findings 0" in progress
    status, out, _ = sanitize("--tool", "racecheck", HANDSHAKE="0", LAYER="4")
    assert status == 1
    assert "racecheck: 4 findings" in out
    assert f"watches {MISREPORTED}" in out


def test_summaries_of_every_tool_are_read() -> None:
    summary = "========= ERROR SUMMARY: "
    many = f"{summary}64 errors\n{summary}44 errors were not printed. Use --print-limit\n"
    assert findings_in(many) == 64
    race = "x\n========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n"
    assert findings_in(race) == 3
    assert findings_in("========= ERROR SUMMARY: 0 errors\n") == 0
    assert findings_in("ERROR SUMMARY: 0 errors, printed by the program itself\n") is None


@pytest.mark.parametrize("test", TESTS)
def test_the_default_tests_exist(test: str) -> None:
    assert list((PROJECT / test).glob("test_*.py"))
