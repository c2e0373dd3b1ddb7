"""A real git server on loopback: `git http-backend` behind replies that a test chooses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.repositories import GIT_ENVIRONMENT
from tests.servers import Handler, Server, serving


@dataclass
class GitServer:
    """The repositories in `root`, and how their server refuses.

    Attributes:
        anonymous: the status of replies to requests without a credential; 200 serves them.
        authorized: the same for requests with a credential.
        renamed: folders of repositories that moved, with their present names.
        credentials: the paths of the requests that carried a credential.
    """

    root: Path
    url: str = ""
    anonymous: int = 200
    authorized: int = 200
    renamed: dict[str, str] = field(default_factory=dict)
    credentials: list[str] = field(default_factory=list)


@contextmanager
def serving_git(root: Path) -> Iterator[GitServer]:
    """Serve the bare repositories in `root` until the end of the block."""
    git = GitServer(root)

    class Backend(Handler):
        def serve(self) -> None:
            body = self.read_body()
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            known = "Authorization" in self.headers
            if known:
                git.credentials.append(self.path)
            name = self.path.split("/")[1]
            status = git.authorized if known else git.anonymous
            if status != 200:
                challenge = {"WWW-Authenticate": "Basic"} if status == 401 else {}
                self.send(status, b"", challenge)
            elif name in git.renamed:
                place = self.path.replace(name, git.renamed[name], 1)
                self.send(301, b"", {"Location": git.url + place})
            else:
                self._run(body)

        def _run(self, body: bytes) -> None:
            path, _, query = self.path.partition("?")
            env = GIT_ENVIRONMENT | {
                "GIT_PROJECT_ROOT": str(root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "REMOTE_USER": "someone",  # pushes are allowed
                "PATH": os.environ["PATH"],
            }
            done = subprocess.run(
                ["git", "http-backend"], input=body, env=env, capture_output=True, check=False
            )  # its status is 1 if it refuses a commit; the reply says why
            head, _, content = done.stdout.partition(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
            status = int(headers.pop("Status", "200").split()[0])
            self.send(status, content, headers)

    server = Server(Backend)
    git.url = server.url
    with serving(server):
        yield git
