"""The nginx configuration of docs/subnet.md, in front of a real API, as on Debian 12."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests import PROJECT
from tests.neurons.live_api import ALICE, LiveApi, serve, submission
from tests.processes import HANG, wait_for
from tests.servers import free_port, make_certificate

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_nginx = pytest.mark.skipif(
    not (NGINX and shutil.which("openssl")), reason="needs nginx and openssl"
)
DEBIAN_FOLDERS = ("/var/cache", "/var/lib/nginx", "/var/log/nginx", "/etc/ssl", "/run")
"""Folders that Debian 12 has after `apt install nginx`; nginx makes one folder in them at most."""


def documented() -> str:
    page = (PROJECT / "docs/subnet.md").read_text()
    (block,) = re.findall(r"^```nginx\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_documented_paths_exist_on_debian_12() -> None:
    paths = [Path(one) for one in re.findall(r"\s(/[\w./-]+)[;\s]", documented()) if one != "/"]
    assert len(paths) == 3
    assert {str(path.parent) for path in paths} <= set(DEBIAN_FOLDERS), paths


@contextmanager
def nginx(folder: Path, api: LiveApi) -> Iterator[str]:
    """Run nginx with the documented configuration before `api`; yield its address."""
    names, port = ("/CN=a", "-addext", "subjectAltName=IP:127.0.0.1"), free_port()
    certificate, key = make_certificate(folder, *names)
    block = documented()
    for one, here in (
        ("/etc/ssl/api.key", str(key)),
        ("/etc/ssl/api.pem", str(certificate)),
        ("/var/cache/quasar-api", str(folder / "cache")),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("http://127.0.0.1:8000", api.url),
    ):
        assert one in block
        block = block.replace(one, here)
    temporary = "".join(
        f"{name}_temp_path {folder / name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""  # others may not read a test's folder
    (folder / "nginx.conf").write_text(
        f"{user}pid {folder / 'pid'};\ndaemon off;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{block}\n}}\n"
    )
    log = folder / "log"
    command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    process = subprocess.Popen([*command, "-g", f"error_log {log};"])
    try:
        wait_for(lambda: is_open(port) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(HANG)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@needs_nginx
def test_miners_and_pages_pass_the_documented_proxy(tmp_path: Path) -> None:
    with (
        serve(tmp_path, trusted_proxies=("127.0.0.1",)) as api,
        nginx(tmp_path, api) as url,
        httpx.Client(base_url=url, verify=False, timeout=HANG) as http,  # noqa: S501 — own key
    ):
        api.register(ALICE)
        for _ in range(5):
            api.judge("/record_failure", {"ip_address": "203.0.113.9"})
        forged = ALICE.headers() | {"X-Forwarded-For": "203.0.113.9"}
        reply = http.post("/submit_kernel", json=submission(ALICE), headers=forged)
        assert reply.status_code == 200, "the proxy passed a client's own X-Forwarded-For"
        assert http.get("/get_current_round").json()["total_submissions"] == 1
        page = http.get("/")
        assert page.status_code == 200, (tmp_path / "log").read_text()
        assert "Round 1" in page.text
        assert http.post("/register_miner", content=b"x" * 20_000).status_code == 413
        assert list((tmp_path / "cache").rglob("*")), "pages are cached"
