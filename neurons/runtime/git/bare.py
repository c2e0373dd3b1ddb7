"""A bare repository on this machine that stands for a hosted fork."""

from __future__ import annotations

from pathlib import Path

from neurons.runtime.git.command import HardenedGit, scratch_beside
from neurons.runtime.git.remote import parse_remote


def make_remote(upstream_url: str, path: Path) -> str:
    """Make a bare clone of the upstream at `path`, which stands for the miner's fork.

    An existing repository is left as it is. Returns its file:// address.
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
