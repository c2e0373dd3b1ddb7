"""HTTP servers on loopback, whose replies a test defines."""

import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvicorn

from tests.processes import HANG, run, wait_for

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for no time


class Server(ThreadingHTTPServer):
    """A server on a free port, with a thread per connection."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class Handler(BaseHTTPRequestHandler):
    """One connection: `serve` answers each GET and POST."""

    protocol_version = "HTTP/1.1"
    wbufsize = 2**20  # headers and body in one packet, or each reply costs a delayed ACK

    def serve(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.serve()

    do_POST = do_GET

    def read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole reply, without the default headers Server and Date."""
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def reset(self) -> None:
        """Reset the connection without a reply, as if the server were killed."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.close_connection = True
        self.connection.close()

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):  # the connection was broken on purpose
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def serving(server: HTTPServer) -> Iterator[None]:
    """Serve in a thread until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(HANG)


@contextmanager
def dripping(first: bytes, drop: bytes) -> Iterator[str]:
    """Serve one connection at a time, with replies that begin with `first` and never end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:  # the block has ended
                    return
                with suppress(OSError), client:
                    client.recv(2**16)
                    client.sendall(first)
                    while listener.fileno() >= 0:
                        client.sendall(drop)
                        time.sleep(0.01)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def free_port() -> int:
    """Return a port of loopback at which nothing listens."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def make_certificate(folder: Path, *names: str) -> tuple[Path, Path]:
    """Return the files of a self-signed certificate and its key; `names` are its subject."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    make = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj")
    run(*make, *names, "-keyout", key, "-out", certificate, check=True)
    return certificate, key


@contextmanager
def serving_app(app: Any) -> Iterator[str]:
    """Serve an ASGI application with uvicorn in a thread; yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, proxy_headers=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(HANG)
        assert not thread.is_alive(), "the server did not stop"
