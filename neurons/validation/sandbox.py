"""A clean folder for each submission, and a clone of its fork in it. Nothing in it is trusted."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from neurons.errors import Held, QuasarError
from neurons.git.command import HardenedGit
from neurons.git.remote import Remote, parse_remote

CLONE_SECONDS = 120.0
CHECKOUT_SECONDS = 60.0

_OVERRIDES = {
    "core.symlinks": "false",  # a link out of the tree becomes a text file that names its target
    "core.fsync": "none",  # deleted in a few minutes
    "http.followRedirects": "initial",  # a renamed account redirects; no credential is sent
}


class BadFork(QuasarError):
    """The fork cannot be judged, and trying again would not change that."""


@contextmanager
def sandbox(parent: Path) -> Iterator[Path]:
    """Give an empty folder that is deleted afterwards, whatever happened in it."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="submission-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear(parent: Path) -> None:
    """Delete what a killed validator left behind."""
    for leftover in parent.glob("submission-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def clone(
    fork_url: str,
    commit_hash: str,
    folder: Path,
    *,
    allow_file: bool,
    stop: threading.Event | None = None,
) -> Path:
    """Clone the fork into `folder` at the commit, as a validator does, and return its root.

    Only the tip of the default branch is cloned; another commit is fetched by its hash. No hook,
    submodule, filter, link or transport of the fork's own choice takes effect.

    Raises:
        BadFork: the address or the commit is not there, or is not one that may be cloned.
        Retry: the network or this machine failed for the moment.
    """
    remote = checked_remote(fork_url, allow_file=allow_file)
    if not re.fullmatch(r"[0-9a-f]{40}", commit_hash):
        raise BadFork(f"{commit_hash[:50]!r} is no full commit hash.")
    tree = folder / "tree"
    try:
        above = HardenedGit(folder, timeout=CLONE_SECONDS, stop=stop, overrides=_OVERRIDES)
        options = ("--depth=1", "--no-tags", "--no-checkout", "--template=", "--quiet")
        above.online(remote, None, "clone", *options, "--", remote.url, tree.name)
        inside = HardenedGit(tree, timeout=CHECKOUT_SECONDS, stop=stop, overrides=_OVERRIDES)
        if inside.probe("checkout", "--quiet", "--detach", commit_hash) is None:
            fetch = ("--depth=1", "--no-tags", "--quiet", "origin", commit_hash)
            inside.online(remote, None, "fetch", *fetch, timeout=CLONE_SECONDS)
            inside.execute(["git", "checkout", "--quiet", "--detach", commit_hash])
        there = inside.execute(["git", "rev-parse", "HEAD"])
    except Held as error:
        raise BadFork(f"The fork cannot be cloned: {error.reason}") from error
    if there != commit_hash:
        raise BadFork(f"The fork gave commit {there} for {commit_hash}.")
    return tree


def checked_remote(fork_url: str, *, allow_file: bool) -> Remote:
    """Return the remote of a submitted address: https, or a file when the API is at home.

    Raises:
        BadFork: any other address.
    """
    schemes = ("https", "file") if allow_file else ("https",)
    try:
        if urlsplit(fork_url).scheme in schemes:
            return parse_remote(fork_url)
    except ValueError as error:
        raise BadFork(f"The fork's address cannot be used: {error}") from error
    raise BadFork(f"The fork's address must start with {' or '.join(f'{s}://' for s in schemes)}.")
