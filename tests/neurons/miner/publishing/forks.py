"""Helpers for forks in real repositories: publishing, and commits of other people."""

from collections.abc import Callable
from pathlib import Path

from neurons.miner.publishing.fork import Fork
from tests.repositories import commit, run_git

MakeFork = Callable[..., Fork]


def lay_out(fork: Fork) -> str:
    """Prepare and commit without a push; return the commit."""
    fork.prepare()
    return fork.commit()


def publish(fork: Fork) -> str:
    """Prepare, commit, push and verify; return the commit."""
    made = lay_out(fork)
    fork.push(made)
    fork.verify(made)
    return made


def clone_elsewhere(remote: Path, branch: str) -> Path:
    """Clone as another person."""
    clone = remote.parent / f"elsewhere-{len(list(remote.parent.iterdir()))}"
    run_git(remote.parent, "clone", "-q", "-b", branch, str(remote), str(clone))
    return clone


def commit_elsewhere(
    remote: Path, branch: str, files: dict[str, str], *options: str, amend: bool = False
) -> str:
    """Commit and push as another person; return the hash."""
    clone = clone_elsewhere(remote, branch)
    made = commit(clone, files, *(["--amend"] if amend else []))
    run_git(clone, "push", "-q", *options, "origin", f"HEAD:{branch}")
    return made


def link_elsewhere(remote: Path, place: str, target: Path) -> None:
    """Push a fork's branch whose `place` is a symbolic link."""
    clone = clone_elsewhere(remote, "main")
    run_git(clone, "rm", "-rq", place)
    (clone / place).parent.mkdir(parents=True, exist_ok=True)
    (clone / place).symlink_to(target)
    commit(clone)
    run_git(clone, "push", "-q", "origin", "HEAD:quasar")
