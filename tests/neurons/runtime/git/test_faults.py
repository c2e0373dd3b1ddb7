"""The classification of git's and GitHub's error messages."""

from __future__ import annotations

import errno

import pytest

from neurons.runtime.errors import Held, Retry
from neurons.runtime.git.faults import disk_faults, fault

HELD = [
    (
        "remote: Invalid username or token. Password authentication is not supported.\n"
        "fatal: Authentication failed for 'https://github.com/me/fork.git/'\n",
        "Contents: read and write",
    ),
    (
        "fatal: could not read Username for 'https://github.com': terminal prompts disabled\n",
        "public_repo",
    ),
    (
        "remote: Permission to me/fork.git denied to me.\n"
        "fatal: unable to access 'https://github.com/me/fork/': The requested URL returned "
        "error: 403\n",
        "public_repo",
    ),
    (
        "remote: Write access to repository not granted.\nfatal: unable to access 'https://"
        "github.com/me/fork/': The requested URL returned error: 403\n",
        "Contents: read and write",
    ),
    (
        " ! [remote rejected] x -> quasar (refusing to allow a Personal Access Token to create or "
        "update workflow `.github/workflows/ci.yml` without `workflow` scope)\n",
        "`workflow`",
    ),
    (
        "To https://github.com/me/fork\n!\tabc:refs/heads/quasar\t[rejected] (fetch first)\n",
        "nothing was overwritten",
    ),
    (
        "remote: error: GH006: Protected branch update failed for refs/heads/quasar.\n"
        " ! [remote rejected] x -> quasar (protected branch hook declined)\n",
        "FORK_BRANCH",
    ),
    (
        "remote: Repository not found.\nfatal: repository 'https://github.com/me/fork/' not "
        "found\n",
        "GITHUB_FORK_NAME",
    ),
    ("git@github.com: Permission denied (publickey).\nfatal: Could not read from", "ssh -T"),
    ("fatal: detected dubious ownership in repository at '/x'\n", "chown"),
    ("fatal: Unable to create '/x/.git/index.lock': File exists.\n", ".lock"),
    ("error: object file .git/objects/ab/cd is empty\nfatal: loose object abcd\n", "away"),
    (
        "fatal: unable to access 'https://h/': SSL certificate problem: certificate has expired\n",
        "clock",
    ),
    (
        "fatal: unable to update url base from redirection:\n  asked for: https://a/\n",
        "address",
    ),
    ("fatal: something nobody has seen before\n", "Correct the fault"),
]

TEMPORARY = [
    "fatal: unable to access 'https://github.com/': Could not resolve host: github.com\n",
    "fatal: unable to access 'https://h/': Failed to connect to h port 443: Connection refused\n",
    "fatal: unable to access 'https://h/': The requested URL returned error: 503\n",
    "fatal: unable to access 'https://h/': The requested URL returned error: 429\n",
    "error: RPC failed; curl 56 GnuTLS recv error (-9)\nfatal: the remote end hung up\n",
    "fatal: early EOF\nfatal: fetch-pack: invalid index-pack output\n",
    "error: unable to write file x: No space left on device\nfatal: unable to write new index\n",
    "fatal: unable to access 'https://h/': Operation too slow. Less than 1000 bytes/sec\n",
]


@pytest.mark.parametrize(("complaint", "remedy"), HELD)
def test_permanent_faults_are_held_with_a_remedy(complaint: str, remedy: str) -> None:
    error = fault("push", complaint)
    assert isinstance(error, Held)
    assert remedy in error.remedy


@pytest.mark.parametrize("complaint", TEMPORARY)
def test_temporary_git_faults_are_retried(complaint: str) -> None:
    assert isinstance(fault("fetch", complaint), Retry)


def test_a_full_disk_is_temporary_and_a_forbidden_folder_is_not() -> None:
    with pytest.raises(Retry, match="full"), disk_faults():
        raise OSError(errno.ENOSPC, "No space left on device", "/x")
    with pytest.raises(Held, match="Permission denied"), disk_faults():
        raise OSError(errno.EACCES, "Permission denied", "/x")
