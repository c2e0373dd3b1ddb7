"""A fake GitHub on loopback: its REST calls, and real git over HTTP by git http-backend."""

import base64
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.repositories import GIT_ENVIRONMENT
from tests.servers import Handler, Server, serving

CANARY = "0f8e1d5c7b3a49628d1ecafe0f8e1d5c7b3a4962"
UPSTREAM = "subnet/flash-linear-attention"
UPSTREAM_FILES = {
    "README.md": "upstream\n",
    "fla/__init__.py": "",
    "fla/ops/quasar/chunk.py": "# the upstream's own kernel\n",
    "fla/ops/quasar/theirs.py": "# a file of the upstream's, which stays\n",
}


@dataclass
class Answer:
    """A scripted reply of the REST API or of the git server."""

    status: int
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class GitHub:
    """The server's state: tests change it between calls.

    Attributes:
        folder: bare repositories as `<owner>/<name>.git`.
        scopes: the classic token's scopes, None for a fine-grained one.
        script: replies to successive requests, by `METHOD path`, in place of the normal ones.
        polls_until_made: the number of polls in which a new fork is still missing.
        seen: `METHOD path` of each request, with its headers.
        command_lines: if a set, git requests add the command lines of all processes to it.
        hang: git requests wait until this is set.
        anonymous: the status of replies to git requests without a credential; 200 serves them.
        authorized: the same for requests with a credential.
        renamed: repositories that moved, with their present names.
    """

    def __init__(self, folder: Path, upstream: Path) -> None:
        self.folder = folder
        self.login = "miner"
        self.scopes: str | None = "public_repo"
        self.repositories: dict[str, dict[str, Any]] = {}
        self.script: dict[str, list[Answer]] = {}
        self.polls_until_made = 0
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.command_lines: set[str] | None = None
        self.hang = threading.Event()
        self.anonymous = self.authorized = 200
        self.renamed: dict[str, str] = {}
        self.url = ""
        self.add(UPSTREAM, upstream)

    @property
    def credentials(self) -> list[str]:
        """The requests that carried a credential."""
        return [line for line, headers in self.seen if "Authorization" in headers]

    def add(self, name: str, copied_from: Path | None = None, **facts: Any) -> None:
        """Add a repository, as a copy of `copied_from` if that is set."""
        bare = self.folder / f"{name}.git"
        bare.parent.mkdir(parents=True, exist_ok=True)
        if copied_from is not None:
            shutil.copytree(copied_from, bare)
        self.repositories[name.lower()] = {
            "full_name": name,
            "default_branch": "main",
            "permissions": {"push": True},
            **facts,
        }

    def fork(self, name: str, **facts: Any) -> None:
        source = self.repositories[UPSTREAM]
        self.add(
            name,
            self.folder / f"{UPSTREAM}.git",
            **{"fork": True, "parent": source, "source": source, **facts},
        )

    def rest(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        words = path.strip("/").split("/")
        if path == "/user":
            headers = {} if self.scopes is None else {"X-OAuth-Scopes": self.scopes}
            return Answer(200, {"login": self.login}, headers)
        if method == "POST" and words[-1] == "forks":
            name = f"{self.login}/{body['name']}"
            self.fork(name)
            return Answer(202, {**self.repositories[name.lower()], "default_branch": None})
        found = self.repositories.get("/".join(words[1:]).lower())
        if found and found.get("fork") and self.polls_until_made > 0:
            self.polls_until_made -= 1
            found = None
        if found is None:
            return Answer(404, {"message": "Not Found"})
        return Answer(200, {"clone_url": f"{self.url}/{found['full_name']}.git", **found})


class _Server(Server):
    host: GitHub


class _Handler(Handler):
    server: _Server

    def serve(self) -> None:
        host, body, path = self.server.host, self.read_body(), urlsplit(self.path).path
        request = f"{self.command} {path}"
        host.seen.append((request, dict(self.headers)))
        scripted = host.script.get(request)
        if scripted:
            self.answer(scripted.pop(0))
        elif ".git/" in path:
            if host.command_lines is not None:
                host.command_lines |= running_command_lines()
            host.hang.wait()
            self.git(path, body)
        elif self.headers.get("Authorization") != f"Bearer {CANARY}":
            self.answer(Answer(401, {"message": "Bad credentials"}))
        else:
            content = json.loads(body) if body else {}
            self.answer(host.rest(self.command, path, content))

    def answer(self, answer: Answer) -> None:
        content = answer.body
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send(answer.status, content, answer.headers)

    def git(self, path: str, body: bytes) -> None:
        """Serve a public repository: everybody may read, and the token may write."""
        host, credential = self.server.host, self.headers.get("Authorization")
        status = host.authorized if credential else host.anonymous
        writes = "git-receive-pack" in self.path
        basic = base64.b64encode(f"x-access-token:{CANARY}".encode()).decode()
        if writes and credential != f"Basic {basic}":
            status = 401
        name = path.strip("/").partition(".git/")[0]
        if status != 200:
            challenge = {"WWW-Authenticate": 'Basic realm="git"'} if status == 401 else {}
            self.send(status, b"", challenge)
        elif name in host.renamed:
            place = self.path.replace(name, host.renamed[name], 1)
            self.send(301, b"", {"Location": host.url + place})
        else:
            run_backend(self, host.folder, body, pushes=writes)


def running_command_lines() -> set[str]:
    """Return the command line of every visible process."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def run_backend(handler: Handler, root: Path, body: bytes, *, pushes: bool) -> None:
    """Reply to a request as `git http-backend` does for the repositories in `root`."""
    path, _, query = handler.path.partition("?")
    env = GIT_ENVIRONMENT | {
        "GIT_PROJECT_ROOT": str(root),
        "GIT_HTTP_EXPORT_ALL": "1",
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "REQUEST_METHOD": handler.command,
        "CONTENT_TYPE": handler.headers.get("Content-Type", ""),
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_CONTENT_ENCODING": handler.headers.get("Content-Encoding", ""),
        "GIT_PROTOCOL": handler.headers.get("Git-Protocol", ""),
        "REMOTE_USER": "someone" if pushes else "",
    }
    command = ["git", "http-backend"]  # its status is 1 if it refuses a commit
    done = subprocess.run(command, input=body, env=env, capture_output=True, check=False)
    head, _, content = done.stdout.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
    status = int(headers.pop("Status", "200").split()[0])
    handler.send(status, content, headers)


@contextmanager
def serve(folder: Path, upstream: Path) -> Iterator[GitHub]:
    host = GitHub(folder, upstream)
    host.hang.set()
    server = _Server(_Handler)
    server.host, host.url = host, server.url
    try:
        with serving(server):
            yield host
    finally:
        host.hang.set()
