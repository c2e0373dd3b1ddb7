"""`python -m harness` with real workers."""

from __future__ import annotations

import pytest

from harness.__main__ import _Printer, main
from harness.measuring.runner import MeasurementError
from harness.report import load_report
from harness.terminal import Progress


def test_a_run_from_the_command_line(make_tree, tmp_path, capsys):
    out = tmp_path / "report.json"
    arguments = ["--tree", str(make_tree()), "--lengths", "16", "--runs", "2", "--device", "cpu"]
    assert main([*arguments, "--ungated", "--json", str(out)]) == 0
    report = load_report(out)
    assert [m.length for m in report.measurements] == [16, 16]
    assert not report.checked
    assert report.environment is not None
    printed = capsys.readouterr()
    assert "NOT CHECKED" in printed.out
    slowest = min(m.tokens_per_sec for m in report.measurements)
    assert f"{slowest:,.0f}" in printed.out
    assert "no GPU" in printed.err


def test_a_tree_that_breaks_the_rules_is_measured_and_reported(make_tree, capsys):
    words = ["--tree", str(make_tree()), "--lengths", "16", "--runs", "1", "--device", "cpu"]
    assert main(words) == 1
    printed = capsys.readouterr()
    assert "512 tokens: correct, " in printed.err
    assert "A VALIDATOR REJECTS THIS TREE by its rules: fla/ops/quasar/gate.py" in printed.out


def test_broken_rules_are_printed_before_anything_is_measured(make_tree, monkeypatch, capsys):
    def fail(*_):
        assert "A VALIDATOR REJECTS THIS TREE" in capsys.readouterr().out
        raise MeasurementError("so it is", "crash")

    monkeypatch.setattr("harness.__main__._measure", fail)
    assert main(["--tree", str(make_tree()), "--device", "cpu"]) == 1
    assert "crash: so it is" in capsys.readouterr().err


def test_a_fault_of_the_tree_is_printed_once_per_stream(make_tree, capsys):
    tree = make_tree()
    (tree / "fla/layers/quasar.py").write_text("raise ValueError('boom')\n")
    words = ["--tree", str(tree), "--lengths", "16,32", "--runs", "1", "--device", "cpu"]
    assert main(words) == 1
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    assert printed.err.count("ValueError: boom. --debug shows the worker's log.") == 1
    assert printed.out.count("ValueError: boom") == 1
    assert "16, 32 crash: ValueError: boom" in printed.out
    assert main(["--tree", str(tree / "none")]) == 1
    printed = capsys.readouterr()
    assert printed.out + printed.err == (
        f"{tree}/none has no fla/ops/quasar/chunk.py. Name the root of a fork, or an overlay such "
        "as quasar_kernels/overlay.\n"
    )


@pytest.mark.parametrize("words", ["--lengths 16 --tree {0}", "compare {0} {0}"])
def test_debug_prints_a_workers_traceback(make_tree, capsys, words):
    tree = make_tree("raise ValueError('boom')")
    assert main([*words.format(tree).split(), "--device", "cpu", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--tree is required"),
        (["no-such"], "there is no command 'no-such'; give one of compare, gates"),
        (["comapre"], "there is no command 'comapre'; did you mean 'compare'?"),
        (["--tree", ".", "--lenghts=512", "x"], "--lenghts=512 x; did you mean --lengths?"),
        (["compare", ".", ".", "--pairz", "5"], "did you mean --pairs?"),
        (["--tree", ".", "--lengths", "512,x"], "512,x"),
        (["--tree", ".", "--runs", "0"], "'0'"),
        # named before a measurement, whose result would be lost
        (["--tree", ".", "--json", "/proc/none/x"], "/proc/none/x cannot be written"),
        (["--tree", ".", "--markdown", "/proc"], "/proc cannot be written"),
        (["compare", ".", ".", "--svg", "/proc/none/x"], "/proc/none/x cannot be written"),
        (["history", "report.json"], "history was removed in 0.3.0. `git log -p FILE`"),
        (["schema"], "schema was removed in 0.3.0. `harness/report.py`"),
        (["profile", "--tree", "."], "removed in 0.3.0. `python -m benchmarks layer_profile`"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_only_a_repeated_log_is_the_same_reason(capsys: pytest.CaptureFixture[str]) -> None:
    printer = _Printer(Progress(), runs=1)
    for length, log_tail in ((512, ""), (1024, ""), (2048, "trace"), (4096, "trace")):
        printer.failed(length, MeasurementError("not done within 1 s", "timeout", log_tail))
    lines = capsys.readouterr().err.splitlines()
    assert ["for the same reason" in line for line in lines] == [False, False, False, True], lines
    assert "512 tokens: failed: timeout: not done within 1 s" in lines[0]
