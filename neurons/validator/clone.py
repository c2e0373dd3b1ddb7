"""Clones a submission's fork, which is not trusted, into a separate folder."""

from __future__ import annotations

import contextlib
import re
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from harness.measuring.process import delete, scratch_folder
from neurons.runtime.errors import Held, QuasarError, Retry
from neurons.runtime.git.clone import ignore_attributes
from neurons.runtime.git.command import HardenedGit, Limits
from neurons.runtime.git.gateway import Gateway
from neurons.runtime.git.remote import Remote, parse_remote

CLONE_SECONDS = 120.0
CHECKOUT_SECONDS = 60.0

FETCHED_BYTES = 2**28
"""Limit in bytes on the download of a fork, and on each file that git writes."""
TREE_BYTES, TREE_FILES = 2**28, 20_000
"""Limits on the bytes and files of a commit's tree."""
PATH_BYTES, PATH_PARTS, TREE_FOLDERS = 512, 32, 5_000
"""Limits on the bytes and components of a path, and on the folders of a commit's tree.

The public fork has 478 files; their paths have at most 5 components and 73 bytes.
"""
SUBMODULE = "160000"
"""git's mode of a tree's entry that names another repository's commit."""
LIMITS = Limits(memory=2**32, file=FETCHED_BYTES, seconds=45, output=2**24)
"""Limits of each git process.

After CLONE_SECONDS and CHECKOUT_SECONDS the validator blames the network and tries again. The limit
on CPU time is shorter, so that the validator rejects a fork that keeps git busy.
"""

_OVERRIDES = {
    "core.symlinks": "false",  # a link out of the tree becomes a text file that names its target
    "core.fsync": "none",  # the clone is deleted after the evaluation
    "core.bigFileThreshold": "8m",  # longer objects are streamed, not held in memory
    "http.followRedirects": "initial",  # a renamed account redirects; no credential is sent
    "transfer.unpackLimit": "1",  # one pack, never thousands of files
    "pack.threads": "1",
}


class BadFork(QuasarError):
    """The fork cannot be evaluated; a retry would give the same result."""


@dataclass(frozen=True)
class Sources:
    """The places from which forks are cloned."""

    hosts: tuple[str, ...] = ("github.com",)  # https hosts; empty for every public one
    files: bool = False  # whether file:// addresses of this machine are allowed

    def check(self, fork_url: str) -> Remote:
        """Return the remote of a submitted address, or raise BadFork."""
        schemes = ("https", "file") if self.files else ("https",)
        parts = urlsplit("")
        try:
            parts = urlsplit(fork_url)
            remote = parse_remote(fork_url)
        except ValueError as error:
            if parts.scheme in schemes:
                raise BadFork(f"The fork's address cannot be used: {error}") from error
        if parts.scheme not in schemes:
            begins = " or ".join(f"{scheme}://" for scheme in schemes)
            raise BadFork(f"The fork's address must start with {begins}.")
        if parts.scheme == "https" and self.hosts and parts.hostname not in self.hosts:
            raise BadFork(f"Forks are cloned from {', '.join(self.hosts)} only.")
        return remote


@contextmanager
def submission_folder(parent: Path) -> Iterator[Path]:
    """Create an empty folder, and delete it with its content afterwards."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with scratch_folder("submission-", parent) as folder:
        yield folder


def clear(parent: Path) -> None:
    """Delete the folders that a killed validator left behind."""
    if parent.is_symlink() or not parent.is_dir():
        delete(parent)
        return
    for leftover in parent.glob("submission-*"):
        delete(leftover)


def clone(
    fork_url: str,
    commit_hash: str,
    folder: Path,
    *,
    sources: Sources,
    stop: threading.Event | None = None,
) -> Path:
    """Clone the fork into `folder` at the commit, and return the root of the checkout.

    Only the tip of the default branch is cloned; another commit is fetched by its hash. Hooks,
    submodules, filters, links and transports of the fork have no effect. All users may read the
    result. Raises BadFork if the address or commit does not exist or exceeds this module's limits,
    and Retry for a temporary failure.
    """
    remote = sources.check(fork_url)
    if not re.fullmatch(r"[0-9a-f]{40}", commit_hash):
        raise BadFork(f"{commit_hash[:50]!r} is not a full commit hash.")
    with contextlib.ExitStack() as stack:
        overrides, gateway = dict(_OVERRIDES), None
        if remote.protocol == "https" and not urllib.request.getproxies().get("https"):
            gateway = stack.enter_context(Gateway(sources.hosts, FETCHED_BYTES))
            overrides["http.proxy"] = gateway.url
        try:
            tree = _clone(remote, commit_hash, folder, overrides, stop)
        except (Held, Retry) as error:
            if gateway and gateway.refusal:
                raise BadFork(gateway.refusal) from error
            if gateway and gateway.unreachable:
                raise Retry(gateway.unreachable) from error
            if isinstance(error, Retry):
                raise
            raise BadFork(f"The fork cannot be cloned: {error.reason}") from error
    for path in (tree, *tree.rglob("*")):  # the sandbox reads it as another user
        if ".git" not in path.relative_to(tree).parts:
            path.chmod(0o755 if path.is_dir() else 0o644)
    return tree


def _clone(
    remote: Remote,
    commit_hash: str,
    folder: Path,
    overrides: Mapping[str, str],
    stop: threading.Event | None,
) -> Path:
    tree = folder / "tree"
    parent = HardenedGit(
        folder, timeout=CLONE_SECONDS, stop=stop, overrides=overrides, limits=LIMITS
    )
    options = ("--depth=1", "--no-tags", "--no-checkout", "--template=", "--quiet")
    parent.online(remote, None, "clone", *options, "--", remote.url, tree.name)
    inside = HardenedGit(
        tree, timeout=CHECKOUT_SECONDS, stop=stop, overrides=overrides, limits=LIMITS
    )
    if inside.probe("cat-file", "-e", f"{commit_hash}^{{commit}}") is None:
        fetch = ("--depth=1", "--no-tags", "--quiet", "origin", commit_hash)
        inside.online(remote, None, "fetch", *fetch, timeout=CLONE_SECONDS)
    _check_size(inside, commit_hash)
    ignore_attributes(tree)  # as in the miner's clone: both measure the same bytes
    inside.execute(["git", "checkout", "--quiet", "--detach", commit_hash])
    head = inside.execute(["git", "rev-parse", "HEAD"])
    if head != commit_hash:
        raise BadFork(f"The checkout is at commit {head}, not at {commit_hash}.")
    return tree


def _check_size(tool: HardenedGit, commit_hash: str) -> None:
    """Raise BadFork, before the checkout, for a commit with a tree over the limits."""
    listing = tool.probe("ls-tree", "-r", "-l", "-z", "--full-tree", commit_hash)
    if listing is None:
        raise BadFork("git cannot list the commit, or it has too many files.")
    rows = [row.partition("\t") for row in listing.split("\0") if row]
    if len(rows) > TREE_FILES:
        raise BadFork(f"The commit has more than {TREE_FILES} files.")
    sizes = [facts.split()[-1] for facts, _, _ in rows]
    if sum(int(size) for size in sizes if size != "-") > TREE_BYTES:
        raise BadFork(f"The commit's files exceed {TREE_BYTES // 2**20} MiB.")
    folders: set[str] = set()
    for facts, _, path in rows:
        if len(path.encode(errors="surrogateescape")) > PATH_BYTES:
            raise BadFork(f"The commit has a path of more than {PATH_BYTES} bytes.")
        parts = path.split("/")
        if facts.startswith(SUBMODULE):  # the checkout makes an empty folder for each
            folders.add(path)
        if len(parts) > PATH_PARTS:
            raise BadFork(f"The commit has a path of more than {PATH_PARTS} parts.")
        folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
        if len(folders) > TREE_FOLDERS:
            raise BadFork(f"The commit has more than {TREE_FOLDERS} folders.")
