"""Reads a fork as validators do: anonymously, from its https address, with redirects followed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from neurons.runtime.errors import Held
from neurons.runtime.git.clone import read_heads
from neurons.runtime.git.command import HardenedGit
from neurons.runtime.git.faults import HostRefused, PrivateFork, Redirected
from neurons.runtime.git.remote import Remote, Token


def anonymous(tool: HardenedGit) -> HardenedGit:
    """Return git for the tool's folder that follows redirects, so it must never send a token."""
    overrides = {**tool.overrides, "http.followRedirects": "initial"}
    return HardenedGit(tool.folder, timeout=tool.timeout, stop=tool.stop, overrides=overrides)


def public_address(remote: Remote) -> Remote:
    """Return the address from which validators clone: the https address of an ssh remote."""
    if remote.protocol != "ssh":
        return remote
    return Remote(remote.public_url, remote.public_url, "https")


def public_heads(tool: HardenedGit, remote: Remote, token: Token | None) -> dict[str, str]:
    """Return the remote's branches with their commits, as validators see them.

    Raises:
        PrivateFork: the host refuses anonymous access, and accepts the miner's credentials.
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

    The fetch goes into an empty repository, because git does not ask for a commit that it has.
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
