"""Clones of forks, created completely or not at all; and what validators can read of a fork."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from neurons.runtime.errors import Held, Retry
from neurons.runtime.git.command import HardenedGit, scratch_beside
from neurons.runtime.git.faults import HostRefused, PrivateFork, Redirected
from neurons.runtime.git.remote import Remote, Token, parse_remote

_FETCH_FACTOR = 5  # a fetch may take this many timeouts: a first one transfers the whole history

_PLAIN_BYTES = "* -text -eol -ident -filter -working-tree-encoding\n"


def read_heads(
    tool: HardenedGit, remote: Remote, token: Token | None
) -> tuple[dict[str, str], str]:
    """Return the remote's branches with their commits, and its default branch.

    If HEAD names none of them, main, master or the first branch is the default; "" if none exists.
    """
    listing = tool.online(
        remote, token, "ls-remote", "--symref", "--", remote.url, "HEAD", "refs/heads/*"
    )
    rows = [line.split("\t", 1) for line in listing.splitlines() if "\t" in line]
    heads = {
        name.removeprefix("refs/heads/"): value
        for value, name in rows
        if name.startswith("refs/heads/") and re.fullmatch(r"[0-9a-f]{40}", value)
    }
    named = [value.removeprefix("ref: refs/heads/") for value, name in rows if name == "HEAD"]
    default = next((name for name in (*named, "main", "master", *heads) if name in heads), "")
    return heads, default


def fetch_branch(
    tool: HardenedGit,
    remote: Remote,
    token: Token | None,
    branch: str,
    tip: str,
    namespace: str = "origin",
) -> None:
    """Fetch the remote's branch, which is at `tip`; raise Retry if it moves meanwhile."""
    ref = f"refs/remotes/{namespace}/{branch}"
    if tool.probe("rev-parse", "--verify", "--quiet", ref) == tip:
        return
    tool.online(
        remote,
        token,
        "fetch",
        *("--quiet", "--no-tags", "--no-write-fetch-head", "--no-recurse-submodules"),
        *("--", remote.url, f"+refs/heads/{branch}:{ref}"),
        timeout=_FETCH_FACTOR * tool.timeout,
    )
    if tool.probe("rev-parse", "--verify", "--quiet", ref) != tip:
        raise Retry(f"The branch {branch} of {remote.public_url} moved while it was fetched.")


def is_clone(tool: HardenedGit, remote: Remote) -> bool:
    """Return whether the tool's folder is a complete clone of `remote`."""
    if not (tool.folder / ".git").is_dir():
        return False
    return tool.probe("config", "--get", "remote.origin.url") == remote.url


def make_clone(tool: HardenedGit, remote: Remote, token: Token | None, branch: str) -> None:
    """Clone into a folder next to the tool's, then rename it: a clone is complete or missing."""
    worktree = tool.folder
    with scratch_beside(worktree) as scratch:
        made = scratch / "clone"
        made.mkdir()
        inside = HardenedGit(made, timeout=tool.timeout, stop=tool.stop, overrides=tool.overrides)
        inside.init("--quiet", "--template=", f"--initial-branch={branch}")
        inside.config("core.symlinks", "false")  # links become text files and lead nowhere
        inside.config("remote.origin.url", remote.url)
        ignore_attributes(made)
        (made / ".git/info/exclude").write_text("__pycache__/\n")
        heads, default = read_heads(inside, remote, token)
        for name in {default, branch} & heads.keys():
            fetch_branch(inside, remote, token, name, heads[name])
        move_away(worktree)
        made.rename(worktree)


def ignore_attributes(worktree: Path) -> None:
    """Make git write files as they are in the repository, regardless of its .gitattributes."""
    information = worktree / ".git" / "info"
    information.mkdir(exist_ok=True)
    (information / "attributes").write_text(_PLAIN_BYTES)


def move_away(worktree: Path) -> None:
    """Rename a damaged clone, or one of another remote; only the newest such clone is kept."""
    if worktree.exists():
        previous = worktree.with_name(f"{worktree.name}.previous")
        shutil.rmtree(previous, ignore_errors=True)
        worktree.rename(previous)


def is_damaged(tool: HardenedGit) -> bool:
    """Return whether git finds the tool's repository damaged, for example by a power cut."""
    slow = HardenedGit(tool.folder, timeout=_FETCH_FACTOR * tool.timeout, stop=tool.stop)
    return slow.probe("fsck", "--full", "--no-dangling", "--no-progress") is None


def remove_locks(tool: HardenedGit) -> None:
    """Remove the locks of killed git processes; this process is the clone's only user."""
    folder = tool.folder / ".git"
    for lock in [*folder.glob("*.lock"), *(folder / "refs").rglob("*.lock")]:
        lock.unlink()


def check_out(tool: HardenedGit, branch: str, tip: str) -> None:
    """Set the clone's branch and files to `tip`, and remove the leftovers of a crash."""
    remove_locks(tool)
    tool.update_ref(f"refs/heads/{branch}", tip)
    tool.symbolic_ref("HEAD", f"refs/heads/{branch}")
    tool.reset("--hard", "--quiet")
    tool.clean("-ffdxq")


def make_remote(upstream_url: str, path: Path) -> str:
    """Make a bare clone of the upstream at `path`, which serves as the miner's fork.

    An existing repository is not changed. Returns its file:// address.
    """
    path = path.absolute()
    if not (path / "HEAD").is_file():
        upstream = parse_remote(upstream_url)
        options = ("--quiet", "--bare", "--no-local", "--template=", "--")
        with scratch_beside(path) as scratch:
            tool = HardenedGit(scratch)
            tool.online(upstream, None, "clone", *options, upstream.url, "remote.git")
            (scratch / "remote.git").rename(path)
    return path.as_uri()


def anonymous(tool: HardenedGit) -> HardenedGit:
    """Return a tool for the same folder that follows redirects. Callers must give it no token."""
    overrides = {**tool.overrides, "http.followRedirects": "initial"}
    return HardenedGit(tool.folder, timeout=tool.timeout, stop=tool.stop, overrides=overrides)


def public_address(remote: Remote) -> Remote:
    """Return the address from which validators clone: the https address of an ssh remote."""
    if remote.protocol != "ssh":
        return remote
    return Remote(remote.public_url, remote.public_url, "https")


def public_heads(tool: HardenedGit, remote: Remote, token: Token | None) -> dict[str, str]:
    """Return the remote's branches with their commits, as validators see them.

    Raises PrivateFork if only the miner's credentials can read the fork.
    """
    try:
        return read_heads(anonymous(tool), public_address(remote), None)[0]
    except Redirected:
        raise
    except HostRefused as refusal:
        if token is None and remote.protocol != "ssh":
            raise
        try:
            read_heads(tool, remote, token)
        except Held:
            raise refusal from None
        raise PrivateFork(
            f"Validators cannot read {remote.public_url}: the host accepts only this miner's "
            f"credentials. {refusal.reason}",
            "Make the repository public.",
        ) from refusal


def is_fetchable(tool: HardenedGit, remote: Remote, commit: str) -> bool:
    """Return whether validators can fetch `commit` by its hash, whatever the branches contain.

    The fetch goes into an empty repository, because git does not fetch a commit that it has.
    """
    with tempfile.TemporaryDirectory(prefix="quasar-fetch-") as scratch:
        inside = anonymous(HardenedGit(Path(scratch), timeout=tool.timeout, stop=tool.stop))
        inside.init("--quiet", "--template=")
        source = public_address(remote)
        options = ("--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules")
        try:
            inside.online(source, None, "fetch", *options, "--", source.url, commit)
        except HostRefused as refusal:
            raise HostRefused(
                f"Validators cannot read {remote.public_url}. {refusal.reason}",
                "Make the repository public, at this address or one to which it redirects.",
            ) from refusal
        except Held:  # the host does not have the commit
            return False
        return inside.probe("cat-file", "-e", f"{commit}^{{commit}}") is not None
