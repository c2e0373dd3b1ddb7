"""Classifies git's error messages as temporary or permanent; permanent ones get a remedy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from neurons.runtime.errors import Held, QuasarError, Retry
from neurons.runtime.observe import redact_text
from neurons.runtime.process import DISK_FAULTS

SCOPE_REMEDY = (
    "Put a token in GITHUB_TOKEN that may write to the fork: a classic one with the scope "
    "`public_repo` (`repo` for a private fork), or a fine-grained one with the permission "
    "Contents: read and write for the fork."
)

# git prints the address, then its HTTP library's message. Without an HTTP status, the fault is in
# the network, a proxy, TLS or this machine's clock. git calls a proxy's error page "not valid".
_TEMPORARY = re.compile(
    r"unable to access 'https?://[^']*': (?!The requested URL returned error)"
    r"|returned error: (?:30[237]|408|429|5\d\d)|HTTP (?:408|429|5\d\d)"
    r"|not valid: is this a git repository|http-push failed|protocol error"
    r"|Could not resolve|Connection (?:refused|reset|timed out)|Could not read from remote"
    r"|hung up|early EOF|unexpected disconnect|RPC failed|Network is unreachable|No route to host"
    r"|Temporary failure|cannot lock ref|failed to update ref|Internal Server Error",
    re.IGNORECASE,
)

# Some of git's messages about a full disk do not give the reason.
_DISK = re.compile(
    "No space left|Disk quota exceeded|Input/output error|unable to write (?:new index )?file"
)


class HostRefused(Held):
    """The git host refused access, hid the repository, or redirected.

    If the same access has worked before, callers treat it as temporary, like an outage.
    """


class Redirected(HostRefused):
    """The git host redirects to another address, which git with credentials does not follow."""


class PrivateFork(HostRefused):
    """The miner can read the fork, but anonymous clients such as validators cannot."""


_PERMANENT: tuple[tuple[str, str, str, type[Held]], ...] = (
    (
        r"workflow` scope",
        "GitHub refused the push because it changes a workflow file.",
        "Give the token in GITHUB_TOKEN the scope `workflow` too.",
        Held,
    ),
    (
        r"\[rejected\]|non-fast-forward|fetch first",
        "Another client pushed to the fork's branch at the same time.",
        "Find out who else pushes there; nothing was overwritten.",
        Held,
    ),
    (
        r"\[remote rejected\](?!.*(?:cannot lock ref|failed to update ref|Internal Server Error))"
        r"|pre-receive hook declined|protected branch",
        "The remote rejected the push.",
        "Allow pushes to the branch on the remote, or set FORK_BRANCH to another name.",
        Held,
    ),
    (
        r"returned error: 40[13]|HTTP 40[13]|Authentication failed|could not read (?:User|Pass)"
        r"|Invalid username or|Permission to .* denied|Write access to repository not granted",
        "The remote refused the credentials: the token is missing, expired or lacks its scope.",
        SCOPE_REMEDY,
        HostRefused,
    ),
    (
        r"Permission denied \(|Host key verification failed",
        "The remote refused the ssh key, or its host key is not known.",
        "Make `ssh -T git@github.com` work without prompts, or set GITHUB_TOKEN.",
        Held,
    ),
    (
        r"returned error: 404|[Rr]epository .*not found|does not appear to be a git repository"
        r"|does not exist",
        "The remote repository does not exist, or the token cannot read it.",
        "Check GITHUB_USERNAME, GITHUB_FORK_NAME or FORK_REMOTE. " + SCOPE_REMEDY,
        HostRefused,
    ),
    (
        r"redirect|returned error: 30[18]",
        "The remote's redirect was refused: the repository or account was renamed.",
        "Set the current names or address; a commitment to the old one stays valid while the old "
        "address redirects. Also check this machine's proxy.",
        Redirected,
    ),
    (
        r"not a git repository|must be run in a work tree",
        "{folder} is not a git checkout.",
        "Set REPO_PATH to the top folder of your fork's checkout, or unset it.",
        Held,
    ),
    (
        r"dubious ownership",
        "The repository belongs to another user.",
        "Give it to the user that runs the miner (chown -R).",
        Held,
    ),
    (
        r"corrupt|bad object|object file .* is empty|unable to read tree|missing (?:blob|tree)"
        r"|reference broken",
        "The repository on this machine is damaged.",
        "Move its folder away; it is cloned again.",
        Held,
    ),
)


def fault(command: str, complaint: str, folder: Path | str = "The folder") -> QuasarError:
    """Return the exception for git's standard error: Retry if temporary, else Held."""
    lines = [
        line
        for line in complaint.splitlines()
        if re.match(r"fatal|error|remote:|ERROR| ! |ssh|git@|\S+: Permission", line)
    ]
    message = redact_text(" | ".join(lines) or complaint).strip().removesuffix(".")
    if _DISK.search(complaint):
        return Retry(f"The disk is full or failing (git {command}): {message}")
    if re.search(r"(?m)^(?!remote:).*\.lock'?: File exists", complaint):
        return Retry(
            f"Another git process uses the repository, or was killed while using it ({command}): "
            f"{message}. If none is running, remove the .lock file that the message names"
        )
    for pattern, reason, remedy, kind in _PERMANENT:
        if re.search(pattern, complaint):
            reason = reason.format(folder=folder)
            return kind(f"{reason} git {command} reported: {message}.", remedy)
    if _TEMPORARY.search(complaint):
        advice = ""
        if "certificate" in complaint:
            advice = ". If this continues, check the address, the proxy and this machine's clock"
        return Retry(f"git {command} could not reach the remote: {message}{advice}")
    return Held(
        f"git {command} failed: {message}.", "Correct the fault that git names, then start again."
    )


@contextlib.contextmanager
def disk_faults() -> Iterator[None]:
    """Raise Retry for a full or failing disk, and Held for a folder that cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FAULTS:
            raise Retry(f"The disk is full or failing: {error.filename}") from error
        raise Held(
            f"{error.filename} cannot be used: {error.strerror}.",
            "Give the user that runs the miner the right to read and write it.",
        ) from error
