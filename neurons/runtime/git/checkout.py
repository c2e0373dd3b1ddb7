"""Checks a checkout: no setting may run a program or redirect a push, no link may lead out of it.

Unlike the miner's own clone, the checkout at REPO_PATH may have dangerous git settings. Hooks,
filters and helpers are overridden; other dangerous settings raise Held, which lists them.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from neurons.runtime.errors import Held
from neurons.runtime.git.command import HardenedGit
from neurons.runtime.git.remote import Remote, parse_remote

# Settings that make a fetch, push or status run programs, redirect a push, weaken the checks of the
# connection that carries the token, or expose that connection.
_REFUSED = re.compile(
    r"url\..*|hook\..*"
    r"|remote\.(?:.*\.(?:vcs|uploadpack|receivepack|proxy|pushurl)|.*[/:].*)"
    r"|http\.(?:.*\.)?(?:proxy|sslverify|sslcainfo|sslcapath|extraheader|cookiefile"
    r"|curloptresolve)"
    r"|core\.(?:worktree|alternaterefscommand|gitproxy)"
)


def checkout_config(tool: HardenedGit) -> dict[str, str]:
    """Return the settings that disable the checkout's filters; raise Held for refused ones."""
    top = Path(tool.rev_parse("--show-toplevel"))
    if top.resolve() != tool.folder.resolve():
        raise Held(
            f"REPO_PATH={tool.folder} is not the top of its checkout, which is {top}.",
            "Set REPO_PATH to the top folder of your fork's checkout.",
        )
    names = set(tool.config("--list", "--name-only", "-z").split("\0"))
    refused = sorted(name for name in names if _REFUSED.fullmatch(name.lower()))
    if refused:
        raise Held(
            f"The git settings of REPO_PATH={tool.folder} can redirect a push or run a program: "
            f"{', '.join(refused)}.",
            "Remove them with `git config --unset-all <name>`, or unset REPO_PATH.",
        )
    drivers = {name.rpartition(".")[0] for name in names if name.startswith("filter.")}
    off = {"clean": "", "smudge": "", "process": "", "required": "false"}
    return {f"{driver}.{part}": value for driver in drivers for part, value in off.items()}


def checkout_branch(tool: HardenedGit) -> str:
    """Return the name of the branch that is checked out; raise Held if none is."""
    name = tool.probe("symbolic-ref", "--quiet", "--short", "HEAD")
    if name is None:
        raise Held(f"REPO_PATH={tool.folder} is not on a branch.", "Check a branch out there.")
    return name


def checkout_origin(tool: HardenedGit, *, with_token: bool) -> Remote:
    """Return the checkout's remote `origin`, or raise Held; see `parse_remote`."""
    url = tool.probe("config", "--get", "remote.origin.url")
    if not url:
        raise Held(
            f"REPO_PATH={tool.folder} has no remote `origin`.",
            "Add it with `git remote add origin https://github.com/<you>/<fork>`.",
        )
    try:
        return parse_remote(url, base=tool.folder, with_token=with_token)
    except ValueError as error:
        raise Held(
            f"The remote `origin` of REPO_PATH={tool.folder} cannot be used: {error}",
            "Set it with `git remote set-url origin https://github.com/<you>/<fork>`.",
        ) from None


def changed_files(tool: HardenedGit) -> list[str]:
    """Return the new files, and the files that differ from the commit that is checked out."""
    listing = tool.status(
        *("--porcelain=v1", "-z", "--no-renames"),
        *("--untracked-files=all", "--ignore-submodules=all"),
    )
    return [entry[3:] for entry in listing.split("\0") if entry]


def destination(root: Path, name: PurePosixPath) -> Path:
    """Return where the overlay file `name` goes in the fork; raise Held for a link in its path."""
    path = root
    for part in name.parts:
        path /= part
        if path.is_symlink():
            raise Held(
                f"{path} is a symbolic link, which may lead out of the fork.",
                "Replace it by a folder or a file in the fork, then start again.",
            )
        if path != root / name and path.exists() and not path.is_dir():
            raise Held(
                f"{path} has to be a folder, but is a file in the fork.",
                "Remove it from the fork's branch, then start again.",
            )
    return path
