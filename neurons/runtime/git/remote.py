"""Addresses of forks, and the token, which is sent to one host only."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from neurons.runtime.errors import ConfigError, Problem
from neurons.runtime.observe import redact_text, register_secret
from neurons.runtime.values import LOOPBACK, expand_home


@dataclass(frozen=True)
class Remote:
    """A fork's address: `url` for git, `public_url` for submissions."""

    url: str
    public_url: str
    protocol: str

    @property
    def origin(self) -> str:
        """Scheme, host and a slash: git sends the token only to addresses that begin with it."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}/"

    @property
    def host(self) -> str:
        """Host and port, in lower case."""
        return urlsplit(self.url).netloc.lower()

    @property
    def path(self) -> Path:
        return Path(unquote(urlsplit(self.url).path, errors="surrogateescape"))


def parse_remote(text: str, *, base: Path | None = None, with_token: bool = False) -> Remote:
    """Return the remote that `text` names: an https, ssh or file address, or a path.

    An http address must be of this machine. A relative path starts at `base`. With `with_token`, an
    ssh address of GitHub becomes https. Raises a ValueError if `text` is none of these; the error's
    message is a sentence without secrets.
    """
    shown = redact_text(text)
    if re.match(r"[A-Za-z0-9_+-]+::", text):
        raise ValueError(f"{shown} names a remote helper, which can run programs.")
    if "://" not in text:
        scp = re.fullmatch(r"(?:[\w.-]+@)?([\w-][\w.-]+):([^:]+)", text)
        local = expand_home(Path(base or ".", text)).absolute()
        if scp and not text.startswith(("/", ".")) and not local.exists():
            return _ssh(text, scp[1], scp[2], with_token)
        return Remote(local.as_uri(), local.as_uri(), "file")
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.hostname in (None, "localhost"):
        uri = Path(unquote(parts.path, errors="surrogateescape")).absolute().as_uri()
        return Remote(uri, uri, "file")
    if parts.scheme == "ssh" and parts.hostname:
        return _ssh(text, parts.hostname, parts.path, with_token)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{shown} must be an https, ssh or file address, or a path.")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"{shown} carries a credential or a query.")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ValueError(f"{shown} is http: a token would be sent without encryption.")
    url = text.rstrip("/")
    return Remote(url, public_form(url), parts.scheme)


def named_remote(text: str, setting: str) -> Remote:
    """Return the remote that a setting names, or raise a ConfigError."""
    try:
        return parse_remote(text)
    except ValueError as error:
        problem = Problem(f"{setting}: {error}", "Give an https address or a path.")
        raise ConfigError(problem) from None


def public_form(url: str) -> str:
    """Return the address as it is submitted: no slash at the end, no `.git` at GitHub."""
    url = url.rstrip("/")
    return url.removesuffix(".git") if urlsplit(url).hostname == "github.com" else url


def _ssh(text: str, host: str, path: str, with_token: bool) -> Remote:
    name = path.strip("/")
    url = f"https://{host}/{name}"
    if host == "github.com" and with_token:
        return Remote(url, public_form(url), "https")
    return Remote(text, public_form(url), "ssh")


@dataclass(frozen=True)
class Token:
    """A token, and the only host (with its port) to which it is sent."""

    value: str = field(repr=False)
    host: str = ""

    def __post_init__(self) -> None:
        register_secret(self.value)
        register_secret(self.basic)

    @property
    def basic(self) -> str:
        """The value for HTTP basic authentication: base64 of `x-access-token:TOKEN`."""
        return base64.b64encode(f"x-access-token:{self.value}".encode()).decode()
