"""Real git repositories, independent of this user's git settings."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

GIT_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    **{f"GIT_{role}_NAME": "someone" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "someone@example.org" for role in ("AUTHOR", "COMMITTER")},
}


def run_git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", *words],
        cwd=folder,
        env=GIT_ENVIRONMENT,
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts to files by their names, and create the folders."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def commit(checkout: Path, files: Mapping[str, str] | None = None, *options: str) -> str:
    """Write `files`, commit all changes, and return the hash."""
    write_files(checkout, files or {})
    run_git(checkout, "add", "--all", "--force")
    run_git(checkout, "commit", "--quiet", "--allow-empty", "-m", "Change", *options)
    return run_git(checkout, "rev-parse", "HEAD")


def make_checkout(path: Path, files: Mapping[str, str]) -> Path:
    """Create a repository with a work tree and one commit of `files` on main."""
    path.mkdir(parents=True, exist_ok=True)
    run_git(path, "init", "-q")
    commit(path, files)
    return path


def make_repository(path: Path, files: Mapping[str, str]) -> Path:
    """Create a bare repository with one commit of `files` on main."""
    source = make_checkout(path.with_suffix(".source"), files)
    run_git(source, "clone", "-q", "--bare", str(source), str(path))
    return path
