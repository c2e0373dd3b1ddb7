"""The history of a committed report, over a real git repository."""

from __future__ import annotations

from harness.analysis.history import entries, main, table
from harness.report import build_report, write_report
from tests.harness.samples import make_sample
from tests.repositories import commit, make_checkout


def test_the_history_shows_speeds_and_changes_by_commit(tmp_path, capsys):
    repository = make_checkout(tmp_path / "data", {"README.md": "x\n"})
    file = repository / "overlay.json"
    for speeds in ((1000.0, 1010.0), (1500.0,)):
        runs = [make_sample(512, speed) for speed in speeds]
        write_report(file, build_report("p", None, runs))
        commit(repository)
    file.write_bytes(b"{\xff")
    commit(repository)
    history = list(entries(file))
    assert [entry.speeds for entry in history] == [{512: 1000.0}, {512: 1500.0}, {}]
    lines = table(history).splitlines()
    assert "1,500  +50.0%" in lines[2]
    assert "measure again" in lines[3]
    assert main([str(file)]) == 0
    assert "+50.0%" in capsys.readouterr().out


def test_a_file_outside_a_repository_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path / "x.json")]) == 1
    assert "x.json" in capsys.readouterr().err
