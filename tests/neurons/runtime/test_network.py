"""The environment's proxies and certificates, with a real proxy and real processes."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from neurons.miner.publishing.github import check_token
from neurons.runtime.errors import EX_CONFIG, ConfigError
from neurons.runtime.network import certificates, client_options
from neurons.wire.client import ApiClient
from tests.neurons.fake_validator_api import FakeValidatorApi, serve
from tests.neurons.miner.miner_command import idle_environment
from tests.neurons.miner.parts import Key
from tests.servers import Handler, Server, serving

PASSWORD = "pass-word"
BAD_PROXIES = {
    f"socks5h://me:{PASSWORD}@127.0.0.1:9": "is a SOCKS proxy, which is not supported",
    f"ftp://me:{PASSWORD}@proxy:1": "has the scheme ftp",
    "http://proxy:99999": "does not have the form http://host:port",
    "::::": "does not have the form http://host:port",
    f"http://me:{PASSWORD}@a..b:3128": "does not have the form http://host:port",
    "xn--:3128": "does not have the form http://host:port",
    "http://[::1": "does not have the form http://host:port",
}
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    certificates.cache_clear()
    yield
    certificates.cache_clear()


@pytest.mark.parametrize("value", BAD_PROXIES)
@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "ALL_PROXY"])
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    for act in (
        lambda: ApiClient("https://api.example", Key()),
        lambda: check_token("https://api.github.example", "token", "me"),
    ):
        with pytest.raises(ConfigError) as caught:
            act()
        assert str(caught.value).startswith(f"{name} {BAD_PROXIES[value]}: give "), caught.value
        assert PASSWORD not in str(caught.value)
    monkeypatch.setenv("NO_PROXY", "api.example")
    ApiClient("https://api.example", Key()).close()


@pytest.mark.parametrize("content", [None, "folder", "", "no certificate"])
def test_a_certificate_file_that_cannot_be_read_is_named(monkeypatch, tmp_path, content):
    path = tmp_path / "certificates.pem"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with pytest.raises(ConfigError, match=f"SSL_CERT_FILE={path} cannot be read"):
        ApiClient("https://api.example", Key())


def test_a_missing_folder_of_certificates_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_CERT_DIR", f"{tmp_path}/a:{tmp_path}/b")
    with pytest.raises(ConfigError, match="SSL_CERT_DIR="):
        certificates()
    certificates.cache_clear()
    (tmp_path / "b").mkdir()
    certificates()


def test_calls_of_this_machine_need_neither_proxy_nor_certificates(monkeypatch, tmp_path):
    monkeypatch.setenv("ALL_PROXY", "socks5h://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "[::1],fd00::/8")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    with serve(FakeValidatorApi()) as url:
        client = ApiClient(url, Key())
        assert client.serves_competition() is not False
        client.close()


@pytest.mark.parametrize(
    ("host", "exceptions", "excepted"),
    [
        ("api.example", "[::1],fd00::/8,localhost", False),
        ("api.example", "other.example, .example", True),
        ("api.example", "*", True),
        ("api.example", "other, *.example", True),
        ("api.example", "*.other,*ample", False),
        ("api.example", "api.example:443", True),
        ("api.example", "api.example:80", False),
        ("api.example:8443", "*.example:8443", True),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("11.1.2.3", "10.0.0.0/8", False),
        ("fd00::7", "[::1],fd00::/8", True),
        ("fe00::7", "[::1],fd00::/8", False),
        ("2001:db8::1", "[2001:db8::1]", True),
    ],
)
def test_no_proxy_takes_names_addresses_and_networks(monkeypatch, host, exceptions, excepted):
    monkeypatch.setenv("HTTPS_PROXY", "proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", exceptions)
    url = f"https://[{host}]" if "::" in host else f"https://{host}"
    proxy = client_options(url)["proxy"]
    assert (proxy is None) == excepted
    assert excepted or proxy.url == httpx.URL("http://proxy.example:3128")


def test_a_proxy_is_used_with_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    class Proxy(Handler):
        def serve(self) -> None:
            asked.append((self.path, self.headers.get("Proxy-Authorization")))
            self.send(204, b"")

    server = Server(Proxy)
    with serving(server):
        monkeypatch.setenv("http_proxy", f"me:{PASSWORD}@127.0.0.1:{server.server_port}")
        url = "http://api.example/health"
        assert httpx.get(url, **client_options(url)).status_code == 204
    ((path, credentials),) = asked
    assert path == url
    assert credentials is not None
    assert credentials.startswith("Basic ")


@pytest.mark.parametrize(
    "variables",
    [{"ALL_PROXY": "socks5h://127.0.0.1:9"}, {"SSL_CERT_FILE": "/nonexistent/certificates"}],
    ids=["proxy", "certificates"],
)
@pytest.mark.usefixtures("no_software")
def test_the_miner_ends_with_one_sentence_and_78(command, tmp_path, variables):
    given: dict[str, Any] = idle_environment(tmp_path) | variables
    given["VALIDATOR_API_URL"] = "https://api.example"
    ended = command(**given)
    assert ended.returncode == EX_CONFIG, ended
    (name,) = variables
    assert ended.stderr.splitlines()[-1].startswith(name), ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    checked = command("doctor", **given)
    assert checked.returncode == 1, checked
    assert f"failure  api           {name}" in checked.stdout
    assert "Traceback" not in checked.stderr + checked.stdout
