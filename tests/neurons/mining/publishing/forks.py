"""Forks in real repositories: what the upstream holds, publishing, and commits of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from neurons.mining.publishing.fork import Fork
from tests.repositories import commit, run_git

MakeFork = Callable[..., Fork]


def publish(fork: Fork) -> str:
    """Prepare, commit, push and verify; return the commit."""
    fork.prepare()
    made = fork.commit()
    fork.push(made)
    fork.verify(made)
    return made


def commit_elsewhere(
    remote: Path, branch: str, files: dict[str, str], *options: str, amend: bool = False
) -> str:
    """Commit and push as somebody else would; return the hash."""
    clone = remote.parent / f"elsewhere-{len(list(remote.parent.iterdir()))}"
    run_git(remote.parent, "clone", "-q", "-b", branch, str(remote), str(clone))
    made = commit(clone, files, *(["--amend"] if amend else []))
    run_git(clone, "push", "-q", *options, "origin", f"HEAD:{branch}")
    return made
