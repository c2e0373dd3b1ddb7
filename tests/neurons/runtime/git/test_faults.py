"""The classification of git's and GitHub's error messages."""

import errno
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from neurons.runtime.errors import Held, Retry
from neurons.runtime.git.command import HardenedGit
from neurons.runtime.git.faults import disk_faults, fault
from neurons.runtime.git.remote import parse_remote

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
    ("error: object file .git/objects/ab/cd is empty\nfatal: loose object abcd\n", "away"),
    ("fatal: unable to update url base from redirection:\n  asked for: https://a/\n", "address"),
    ("fatal: unable to access 'https://h/': The requested URL returned error: 301\n", "address"),
    ("fatal: unable to access 'https://h/': The requested URL returned error: 410\n", "fault"),
    ("fatal: unable to access '/x/.git/config': Permission denied\n", "fault"),
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
    "error: unable to write file fla/ops/chunk.py\nfatal: Could not reset index file to 'HEAD'.\n",
    "fatal: write error: Input/output error\n",
    "fatal: unable to access 'https://h/': Operation too slow. Less than 1000 bytes/sec\n",
    "fatal: unable to access 'https://h/': HTTP/2 stream 1 was not closed cleanly before end of "
    "the underlying stream\n",
    "fatal: unable to access 'https://h/': Error in the HTTP2 framing layer\n",
    "fatal: unable to access 'https://h/': SSL connection timeout\n",
    "fatal: unable to access 'https://h/': SSL certificate problem: certificate is not yet valid\n",
    "Connection closed by 140.82.121.4 port 22\nfatal: Could not read from remote repository.\n",
    " ! [remote rejected] x -> quasar (Internal Server Error)\n",
    "remote: error: cannot lock ref 'refs/heads/quasar': Unable to create '/r/quasar.lock': File "
    "exists.\n ! [remote rejected] x -> quasar (failed to update ref)\n",
    "fatal: Unable to create '/x/.git/index.lock': File exists.\n",
]


def reply(status: str, body: str = "", length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n"
    return f"{head}Connection: close\r\n\r\n{body}".encode()


OUTAGES = {
    "a proxy's page in place of the repository": reply("200 OK", "<html>\nlog in\n</html>\n"),
    "a redirect to a login page": reply("302 Found"),
    "a request timeout": reply("408 Request Timeout"),
    "a reply that breaks off": reply("200 OK", "001e# service", length=1000),
    "another protocol": b"SSH-2.0-x\r\n",
}


class Outage(socketserver.StreamRequestHandler):
    """Answers every request with the server's `answer`, also a proxy's CONNECT."""

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(self.server.answer)  # type: ignore[attr-defined]


@contextmanager
def outage(answer: bytes) -> Iterator[str]:
    """Serve `answer` on loopback; yield the server's address."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Outage) as server:
        server.answer = answer  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def list_heads(folder: Path, address: str) -> None:
    remote = parse_remote(address)
    HardenedGit(folder).online(remote, None, "ls-remote", "--", remote.url)


@pytest.mark.parametrize("answer", OUTAGES.values(), ids=OUTAGES)
def test_row_28_an_outage_of_the_git_host_is_temporary(tmp_path: Path, answer: bytes) -> None:
    with outage(answer) as address, pytest.raises(Retry, match="could not reach"):
        list_heads(tmp_path, f"{address}/me/fork.git")


def test_row_28_an_outage_of_a_proxy_is_temporary(tmp_path, monkeypatch):
    with outage(reply("502 Bad Gateway")) as address:
        monkeypatch.setenv("https_proxy", address)
        with pytest.raises(Retry, match="could not reach"):
            list_heads(tmp_path, "https://git.invalid/me/fork.git")


@pytest.mark.parametrize(("complaint", "remedy"), HELD)
def test_permanent_faults_are_held_with_a_remedy(complaint: str, remedy: str) -> None:
    error = fault("push", complaint)
    assert isinstance(error, Held)
    assert remedy in error.remedy


@pytest.mark.parametrize("complaint", TEMPORARY)
def test_temporary_git_faults_are_retried(complaint: str) -> None:
    assert isinstance(fault("fetch", complaint), Retry)


def test_a_full_disk_is_temporary_and_a_forbidden_folder_is_not() -> None:
    for number in (errno.ENOSPC, errno.EIO):
        with pytest.raises(Retry, match="full or failing"), disk_faults():
            raise OSError(number, "No space left on device", "/x")
    with pytest.raises(Held, match="Permission denied"), disk_faults():
        raise OSError(errno.EACCES, "Permission denied", "/x")
