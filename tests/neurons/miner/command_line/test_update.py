"""Updates are found at a real origin; nothing is fetched or installed."""

from __future__ import annotations

from pathlib import Path

from neurons.miner.command_line.update import newer_commit
from tests.repositories import commit, make_checkout, run_git


def test_a_newer_commit_of_the_branch_is_found_and_not_fetched(tmp_path: Path) -> None:
    origin = make_checkout(tmp_path / "origin", {"a": "1"})
    run_git(tmp_path, "clone", "--quiet", str(origin), "here")
    here = tmp_path / "here"
    assert newer_commit(here) is None
    newest = commit(origin, {"a": "2"})
    assert newer_commit(here) == newest
    assert newest not in run_git(here, "cat-file", "--batch-check", "--batch-all-objects")
    run_git(here, "pull", "--quiet")
    assert newer_commit(here) is None
    commit(here, {"b": "ahead of its origin"})
    assert newer_commit(here) is None


def test_no_update_is_found_without_a_checkout_or_an_origin(tmp_path: Path) -> None:
    assert newer_commit(tmp_path) is None
    checkout = make_checkout(tmp_path / "alone", {"a": "1"})
    assert newer_commit(checkout) is None
    run_git(checkout, "remote", "add", "origin", "http://127.0.0.1:9/none.git")
    assert newer_commit(checkout) is None
