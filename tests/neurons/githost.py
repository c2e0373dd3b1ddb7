"""A stand-in for GitHub on loopback: its REST calls, and real git over HTTP by git http-backend."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Long enough that finding it somewhere is no chance, and of no well-known shape.
CANARY = "canary-0f8e1d5c7b3a49628d1e-token"
UPSTREAM = "subnet/flash-linear-attention"

GIT_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    **{f"GIT_{role}_NAME": "someone" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "someone@example.org" for role in ("AUTHOR", "COMMITTER")},
}


def run_git(folder: Path, *words: str) -> str:
    """Run the real git as another person would; return its output."""
    done = subprocess.run(
        ["git", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", *words],
        cwd=folder,
        env=GIT_ENVIRONMENT,
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip()


def make_repository(path: Path, files: dict[str, str]) -> Path:
    """Make a bare repository with one commit of `files` on main."""
    source = path.with_suffix(".source")
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    run_git(source, "init", "-q")
    run_git(source, "add", "-A")
    run_git(source, "commit", "-qm", "Begin")
    run_git(source, "clone", "-q", "--bare", str(source), str(path))
    return path


@dataclass
class Answer:
    """A scripted answer of the REST API or of the git server."""

    status: int
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class GitHub:
    """The server's state: tests change it between calls.

    Attributes:
        folder: bare repositories as `<owner>/<name>.git`.
        scopes: the classic token's scopes, None for a fine-grained one.
        script: answers given instead of the true ones, by `METHOD path`, in their order.
        polls_until_made: how often a new fork is still absent.
        seen: `METHOD path` of each request, with its headers.
        command_lines: every process's command line while a git request was served.
    """

    def __init__(self, folder: Path, upstream: Path) -> None:
        self.folder = folder
        self.login = "miner"
        self.scopes: str | None = "public_repo"
        self.repositories: dict[str, dict[str, Any]] = {}
        self.script: dict[str, list[Answer]] = {}
        self.polls_until_made = 0
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.command_lines: set[str] = set()
        self.hang = threading.Event()
        self.url = ""
        self.add(UPSTREAM, upstream)

    def add(self, name: str, copied_from: Path | None = None, **facts: Any) -> None:
        """Add a repository, as a copy when told of what."""
        bare = self.folder / f"{name}.git"
        bare.parent.mkdir(parents=True, exist_ok=True)
        if copied_from is not None:
            run_git(self.folder, "clone", "-q", "--bare", str(copied_from), str(bare))
            run_git(bare, "config", "http.receivepack", "true")
        self.repositories[name.lower()] = {
            "full_name": name,
            "default_branch": "main",
            "permissions": {"push": True},
            **facts,
        }

    def fork(self, name: str, **facts: Any) -> None:
        """Add a fork of the upstream."""
        source = self.repositories[UPSTREAM]
        self.add(
            name,
            self.folder / f"{UPSTREAM}.git",
            **{"fork": True, "parent": source, "source": source, **facts},
        )

    def rest(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        """Answer a REST call as GitHub does."""
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


class Handler(BaseHTTPRequestHandler):
    host: GitHub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.serve()

    def do_POST(self) -> None:
        self.serve()

    def serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = urlsplit(self.path).path
        asked = f"{self.command} {path}"
        self.host.seen.append((asked, dict(self.headers)))
        scripted = self.host.script.get(asked)
        if scripted:
            self.answer(scripted.pop(0))
        elif ".git/" in path:
            self.host.command_lines |= running_command_lines()
            self.host.hang.wait()
            self.git(path, body)
        elif self.headers.get("Authorization") != f"Bearer {CANARY}":
            self.answer(Answer(401, {"message": "Bad credentials"}))
        else:
            content = json.loads(body) if body else {}
            self.answer(self.host.rest(self.command, path, content))

    def answer(self, answer: Answer) -> None:
        content = answer.body
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response_only(answer.status)  # leaves the Date to the test
        for name, value in {"Content-Length": str(len(content)), **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def git(self, path: str, body: bytes) -> None:
        """Serve reads to everyone and writes to the token, as for a public repository."""
        writes = "git-receive-pack" in self.path
        basic = base64.b64encode(f"x-access-token:{CANARY}".encode()).decode()
        if writes and self.headers.get("Authorization") != f"Basic {basic}":
            self.answer(Answer(401, b"", {"WWW-Authenticate": 'Basic realm="git"'}))
            return
        env = {
            **GIT_ENVIRONMENT,
            "GIT_PROJECT_ROOT": str(self.host.folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": urlsplit(self.path).query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REMOTE_USER": "miner" if writes else "",
            "REMOTE_ADDR": "127.0.0.1",
        }
        done = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        status = int(fields.pop("Status", "200").split()[0])
        self.answer(Answer(status, content, fields))


def running_command_lines() -> set[str]:
    """Return the command line of every process that can be seen."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@contextmanager
def serve(folder: Path, upstream: Path) -> Iterator[GitHub]:
    """Run the stand-in on a free port of loopback."""
    host = GitHub(folder, upstream)
    host.hang.set()
    handler = type("BoundHandler", (Handler,), {"host": host})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    host.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield host
    finally:
        host.hang.set()
        server.shutdown()
        thread.join()
        server.server_close()
