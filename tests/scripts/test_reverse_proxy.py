"""nginx accepts the configuration that docs/subnet.md gives for the reverse proxy."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests import PROJECT
from tests.processes import run


@pytest.mark.skipif(
    not (shutil.which("nginx") and shutil.which("openssl")), reason="needs nginx and openssl"
)
def test_nginx_accepts_the_documented_configuration(tmp_path: Path) -> None:
    page = (PROJECT / "docs/subnet.md").read_text()
    (block,) = re.findall(r"^```nginx\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    make = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1")
    run(*make, "-subj", "/CN=a", "-keyout", key, "-out", certificate, check=True)
    for documented, here in (
        ("/etc/ssl/api.key", key),
        ("/etc/ssl/api.pem", certificate),
        ("/var/cache/nginx/quasar", tmp_path / "cache"),
        ("listen 443", "listen 127.0.0.1:44300"),
    ):
        block = block.replace(documented, str(here))
    temporary = "".join(
        f"{name}_temp_path {tmp_path / name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = (
        f"pid {tmp_path / 'pid'};\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}{block}\n}}\n"
    )
    (tmp_path / "nginx.conf").write_text(text)
    errors = ["-g", f"error_log {tmp_path / 'log'};"]
    done = run("nginx", "-t", "-p", tmp_path, "-c", tmp_path / "nginx.conf", *errors)
    assert done.returncode == 0, done.stderr
