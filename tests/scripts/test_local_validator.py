"""scripts/local_validator.py, with a real clone of a real repository."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import local_validator
import pytest

from harness.measuring.runner import MeasurementError
from harness.measuring.sampler import Sampler
from neurons.runtime.errors import ConfigError
from neurons.validator.evaluate import Evaluator
from neurons.validator.sandbox import Sandbox
from neurons.validator.verdict import reject
from quasar_kernels.contract import OVERLAY, REQUIRED_IMPORTS, TARGET_FILES
from tests.harness.conftest import HONEST, write_tree
from tests.processes import HANG
from tests.repositories import make_checkout, run_git
from tests.small_fla import install_small_fla

WRONG = """
_right = chunk_quasar
def chunk_quasar(*args, **options):
    o, state = _right(*args, **options)
    return o * 1.01, state
"""


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that runs the script with arguments and returns its exit status."""

    def run(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["local_validator.py", *map(str, words)])
        return local_validator.main()

    return run


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A fork whose branch `quasar` lacks the operator's files."""
    root = make_checkout(tmp_path / "my fork", {"README.md": "nothing\n"})
    run_git(root, "checkout", "-q", "-b", "quasar")
    return root


def test_the_newest_commit_of_a_branch(fork: Path) -> None:
    address = local_validator.fork_address(str(fork))
    assert local_validator.newest_commit(address, "quasar") == run_git(fork, "rev-parse", "HEAD")
    with pytest.raises(SystemExit, match="--branch names another"):
        local_validator.newest_commit(address, "no-such-branch")


def test_a_fork_that_breaks_the_rules_is_rejected(fork, judge, capsys):
    assert judge(fork, "--claim", 1000) == 1
    output = capsys.readouterr().out
    assert "REJECTED: The fork breaks the rules" in output
    assert "fla/ops/quasar/chunk.py" in output


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("\n# import fla.ops.gla\n", "FAIL  rules: fla/ops/quasar/chunk.py: The text"),
        ("\nimport no_such\n", "which is not installed. Install"),
        (WRONG, "FAIL  gate: wrong results: "),
        ("\ndef f(:\n", "not Python: invalid syntax (chunk.py, line"),
    ],
)
def test_a_broken_fork_fails_with_the_reason(code, reason, judge, capsys, tmp_path):
    never = "if False:\n" + "".join(f"    {line}\n" for line in REQUIRED_IMPORTS)
    files = dict.fromkeys((f"fla/ops/quasar/{name}" for name in TARGET_FILES), "")
    files["fla/ops/quasar/chunk.py"] = f"{HONEST}\n{never}{code}"
    tree = write_tree(tmp_path, files)
    assert judge("--repo-path", tree, "--seq-len", 16, "--device", "cpu", "--timeout", HANG) == 1
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "load", "verdict"),
    [("cpu", 0.0, "UNDECIDED"), ("cuda", 1e6, "UNDECIDED"), ("cuda", 0.0, "REJECTED")],
)
def test_a_timeout_is_undecided_unless_a_gpu_was_idle(
    device, load, verdict, fork, judge, monkeypatch, capsys
):
    late = MeasurementError("not done within 1 s", "timeout")
    monkeypatch.setattr(local_validator, "check_tree", lambda _: [])
    monkeypatch.setattr(local_validator, "whole_tree", nullcontext)
    monkeypatch.setattr(local_validator, "find_sandbox", lambda *_: None)
    monkeypatch.setattr(Sampler, "run", Mock(side_effect=late))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    late_fork = replace(reject("No measurement (timeout)"), timed_out=True)
    monkeypatch.setattr(Evaluator, "evaluate", lambda *_: late_fork)
    for words in (["--repo-path", str(fork)], [str(fork), "--claim", "1000"]):
        assert judge(*words, "--device", device) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(f"{verdict}: ")
        assert f" is {load:.1f}" in last


@pytest.mark.slow
def test_an_overlay_is_judged_over_fla(judge, monkeypatch, capsys, request, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(install_small_fla(tmp_path / "host"))
    # byte code that Python left in the overlay is not published
    byte_code = OVERLAY / "fla/layers/__pycache__/quasar.cpython-30.pyc"
    byte_code.parent.mkdir(exist_ok=True)
    byte_code.touch()
    request.addfinalizer(byte_code.unlink)
    words = ("--seq-len", 16, "--device", "cpu", "--timeout", HANG)
    assert judge("--repo-path", OVERLAY, *words) == 0
    output = capsys.readouterr().out
    assert "FAIL" not in output
    assert output.splitlines()[-1].startswith("PASSED; weighted score")


def test_a_checkout_is_judged_without_a_claim(fork, judge, capsys):
    folder = fork / "fla/ops/quasar"
    folder.mkdir(parents=True)
    (folder / "\x1b]0;owned\x07.so").touch()
    assert judge("--repo-path", fork) == 1
    output = capsys.readouterr().out
    assert "FAIL  rules: fla/ops/quasar/chunk.py" in output
    assert output.splitlines()[-1] == "REJECTED"
    assert "owned" in output
    assert output.replace("\n", "").isprintable()  # no terminal codes of the fork


def test_the_guide_s_clone_is_judged_by_default(fork, judge, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quasar_work").mkdir()
    fork.rename(tmp_path / "quasar_work/flash-linear-attention")
    assert judge() == 1
    assert "FAIL  rules: fla/ops/quasar/chunk.py" in capsys.readouterr().out


FORGED = "\nPASSED: all is well\x1b[2J\u202e"
"""The end of a name that clears a terminal, and would forge a verdict."""


@pytest.mark.parametrize("where", ["folder", "file", "branch", "no repository", "no folder"])
def test_foreign_text_forges_no_line(where, tmp_path, fork, judge, monkeypatch, capsys):
    arguments, root = [], fork
    if where == "file":
        (fork / f"{FORGED}.so").touch()
        run_git(fork, "add", "-A")
        run_git(fork, "commit", "-q", "-m", "x")
    elif where == "branch":
        arguments = ["--branch", FORGED]
    else:
        root = tmp_path / FORGED.strip()
        if where != "no folder":
            root.mkdir()
        if where == "folder":
            root = fork.rename(root / FORGED)
    monkeypatch.setattr(local_validator, "find_sandbox", lambda *_: None)
    try:
        assert judge(root, "--claim", 1000, *arguments) == 1
        end = ""
    except SystemExit as error:
        end = str(error)
    for line in [*capsys.readouterr().out.split("\n"), *end.split("\n")]:
        assert line.isprintable(), line
        assert not line.startswith("PASSED"), line


def test_a_fork_runs_in_a_sandbox_or_after_a_warning(fork, judge, monkeypatch, capsys):
    used: list[object] = []

    def evaluate(self: Evaluator, _: object) -> object:
        used.append(self.confinement)
        return reject("so it is")

    def no_sandbox(*_: object) -> Sandbox:
        raise ConfigError("No sandbox works here.\nPASSED")

    made = Sandbox("", 2**30)
    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    monkeypatch.setattr(local_validator, "check_imports", lambda *_: None)
    monkeypatch.setattr(local_validator, "open_sandbox", lambda _: made)
    assert judge(fork, "--claim", 1000) == 1
    assert "WARNING" not in capsys.readouterr().out
    monkeypatch.setattr(local_validator, "open_sandbox", no_sandbox)
    assert judge(fork, "--claim", 1000) == 1
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    assert warnings == [
        "WARNING: the fork's code runs with your rights. No sandbox works here. PASSED"
    ]
    assert used == [made, None]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--repo-path", "/nonexistent"], "--repo-path /nonexistent is not a folder"),
        (["--repo-path", "README.md"], "--repo-path README.md is not a folder"),
        (["--repo-path", ".", "--seq-len", "-5"], "'-5' is not a whole number from 1 up"),
        (["--repo-path", ".", "--full", "--target", "0"], "'0' is not a whole number from 1 up"),
        (["/nonexistent", "--claim", "1"], "There is no folder /nonexistent."),
        (["README.md", "--claim", "1"], "There is no folder README.md."),
        (["."], "--claim"),
    ],
)
def test_usage_errors_are_explained(arguments, output, judge, capsys):
    with pytest.raises(SystemExit) as end:
        judge(*arguments)
    out, err = capsys.readouterr()
    assert end.value.code != 0
    assert output in f"{err}{end.value.code}"
    assert "REJECTED" not in out
