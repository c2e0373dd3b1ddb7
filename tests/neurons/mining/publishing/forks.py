"""Forks in real repositories: what the upstream holds, publishing, and commits of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from neurons.mining.publishing.fork import Fork
from tests.neurons.githost import run_git

MakeFork = Callable[..., Fork]

UPSTREAM_FILES = {
    "README.md": "upstream\n",
    "fla/__init__.py": "",
    "fla/ops/quasar/chunk.py": "# the upstream's own kernel\n",
    "fla/ops/quasar/theirs.py": "# a file of the upstream's, which stays\n",
}


def publish(fork: Fork) -> str:
    """Prepare, commit, push and verify; return the commit."""
    fork.prepare()
    commit = fork.commit()
    fork.push(commit)
    fork.verify(commit)
    return commit


def commit_elsewhere(
    remote: Path, branch: str, files: dict[str, str], *options: str, amend: bool = False
) -> str:
    """Commit and push as somebody else would; return the hash."""
    clone = remote.parent / f"elsewhere-{len(list(remote.parent.iterdir()))}"
    run_git(remote.parent, "clone", "-q", "-b", branch, str(remote), str(clone))
    for name, text in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    run_git(clone, "add", "-A")
    run_git(clone, "commit", "-qm", "Something else", *(["--amend"] if amend else []))
    run_git(clone, "push", "-q", *options, "origin", f"HEAD:{branch}")
    return run_git(clone, "rev-parse", "HEAD")
