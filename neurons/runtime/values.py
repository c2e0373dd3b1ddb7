"""The types of the settings' values, with their checks."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, StringConstraints

from neurons.runtime.addresses import require_host, require_name
from neurons.wire.rules import MIN_TARGET

PROJECT = Path(__file__).resolve().parents[2]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
YEAR = 366 * 24 * 3600
"""Longest wait in seconds: operating systems limit timeouts."""
MAX_INTEGER = 2**31 - 1
"""Largest integer of the subnet's messages, and of a 32-bit column of a database."""
HOTKEY = re.compile("5[1-9A-HJ-NP-Za-km-z]{47}")
"""The form of a hotkey's ss58 address."""
TOKEN = re.compile(r"gh[pousr]_|github_pat_|[0-9a-f]{40}$")
"""Prefixes of GitHub's tokens; those from before April 2021 are 40 hexadecimal digits."""
MAX_URL = 2000
"""Maximum length of an address; servers and clients reject longer ones."""
NETWORKS = ("finney", "test", "local", "archive", "devnet", "offline")


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.query or parts.fragment:  # paths are appended to it
        raise ValueError("has a query or a fragment: end the address before ? or #")
    return _address(value)


def _address(value: str) -> str:
    parts = urlsplit(value)
    plain = parts.scheme in ("https", "http") and parts.hostname and "@" not in parts.netloc
    if not plain or len(value) > MAX_URL or re.search(r"[\s\x00-\x1f\x7f\ud800-\udfff]", value):
        raise ValueError("not a plain http(s) address")
    if require_host(value) not in LOOPBACK and parts.scheme == "http":
        raise ValueError("http is for this machine only: the signature header is a credential")
    return value.rstrip("/")


def _secret_url(value: SecretStr) -> SecretStr:
    _address(value.get_secret_value())
    return value


def _no_password(value: str) -> str:
    if re.search(r"://[^/]*@", value):
        raise ValueError("contains a user or a password: use GITHUB_TOKEN for credentials")
    if re.match("(https?|ssh)://", value):
        require_host(value)
    return value


def _not_placeholder(value: str) -> str:
    if re.fullmatch(r"your[_-].*", value, re.IGNORECASE):
        raise ValueError("is still the placeholder of the example file")
    return value


def _token(value: SecretStr) -> SecretStr:
    text = _not_placeholder(value.get_secret_value())
    if not re.fullmatch(r"[\x21-\x7e]+", text):  # it is sent in a header
        raise ValueError("contains a space or a character that no token has")
    if not TOKEN.match(text):
        raise ValueError("does not have the form of a GitHub token")
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[\w.\-]+", value):
        raise ValueError("only letters, digits, dots, hyphens and underscores are allowed")
    if value in (".", ".."):
        raise ValueError("is the path of a folder, not a name")
    return _not_placeholder(value)


def _host(value: str) -> str:
    if ":" in value:
        ipaddress.IPv6Address(value)  # raises ValueError with the reason
    else:
        require_name(value)
    return value


def _servers(value: tuple[str, ...]) -> tuple[str, ...]:
    for word in value:
        hotkey, _, address = word.partition("=")
        if not HOTKEY.fullmatch(hotkey) or urlsplit(address).scheme not in ("http", "https"):
            raise ValueError(f"{word!r} does not have the form hotkey=address")
        require_host(address)
    return value


def _network(value: str) -> str:
    if value not in NETWORKS and not re.fullmatch(r"wss?://\S+", value):
        raise ValueError("unknown network")
    if value not in NETWORKS:
        require_host(value)
    return value


def _command_line(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"is not a valid command line ({error}); check its quotes") from error
    if not words:
        raise ValueError("contains no command")
    return text


def expand_home(path: Path) -> Path:
    """Replace a leading ~ or ~user by the home folder; raise a ValueError if there is none."""
    try:
        return path.expanduser()
    except RuntimeError:  # in a container, a user may have neither HOME nor an account
        raise ValueError(f"{path}: the user has no home folder; give an absolute path") from None


def _words(value: Any) -> Any:
    return tuple(filter(None, re.split(r"[,\s]+", value))) if isinstance(value, str) else value


def _networks(value: tuple[str, ...]) -> tuple[str, ...]:
    for word in value:
        if word != "*":
            ipaddress.ip_network(word, strict=False)  # raises ValueError with the word
    return value


class Form(str):
    """How a value is written, for errors and .env.example; part of an annotation."""


def form_of(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return how a value of this type is written, by the last `Form` in its metadata if any."""
    forms = [one for one in metadata if isinstance(one, Form)]
    if forms:
        return forms[-1]
    words = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return form_of(words[0], words[1:])
    if get_origin(annotation) is Literal:
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if annotation is bool:
        return "true or false"
    return ", or ".join(form_of(one) for one in words if one is not NoneType)


Token = Annotated[
    SecretStr, AfterValidator(_token), Form("a GitHub token, `ghp_...` or `github_pat_...`")
]
Url = Annotated[str, AfterValidator(_url)]
SecretUrl = Annotated[
    SecretStr, AfterValidator(_secret_url), Form("an https address; http on this machine")
]
Folder = Annotated[
    Path,
    AfterValidator(lambda path: PROJECT / expand_home(path)),  # for any working directory
    Form("a folder"),
]
Name = Annotated[str, AfterValidator(_name)]
Repository = Annotated[str, Field(pattern=r"^[\w.\-]+/[\w.\-]+$"), Form("`owner/name`")]
Remote = Annotated[str, AfterValidator(_no_password)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Networks = Annotated[
    Words,
    AfterValidator(_networks),
    Form("IP addresses or networks separated by commas, or * for any"),
]
Hosts = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=r"^[\w\-]+(\.[\w\-]+)*$", to_lower=True)], ...],
    BeforeValidator(_words),
    Form("names of hosts separated by commas, such as github.com"),
]
_Hotkey = Annotated[str, Field(pattern=f"^{HOTKEY.pattern}$")]
Hotkey = Annotated[_Hotkey, Form("an ss58 address")]
Hotkeys = Annotated[
    tuple[_Hotkey, ...], BeforeValidator(_words), Form("ss58 addresses separated by commas")
]
Servers = Annotated[
    Words, AfterValidator(_servers), Form("hotkey=address pairs separated by commas")
]
CommandLine = Annotated[
    str, AfterValidator(_command_line), Form("a command line, run without a shell")
]
Host = Annotated[str, AfterValidator(_host), Form("an address of this machine")]
Network = Annotated[
    str,
    AfterValidator(_network),
    Form("finney, test, local, archive, devnet, a ws:// or wss:// address, or offline"),
]
Port = Annotated[int, Field(ge=0, le=65535), Form("a port from 0 to 65535")]
Seconds = Annotated[
    float, Field(gt=0, le=YEAR, allow_inf_nan=False), Form("seconds, above 0 and at most a year")
]
Count = Annotated[int, Field(gt=0, le=MAX_INTEGER), Form("a whole number from 1")]
CountOrNone = Annotated[int, Field(ge=0, le=MAX_INTEGER), Form("a whole number from 0")]
Target = Annotated[
    int, Field(ge=MIN_TARGET, le=MAX_INTEGER), Form(f"a whole number of tokens from {MIN_TARGET}")
]
