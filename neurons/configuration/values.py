"""The kinds of value that settings have, each with the check that it needs."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

PROJECT = Path(__file__).resolve().parents[2]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("https", "http") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("not a plain http(s) address")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ValueError("http is for this machine only: the signature header is a credential")
    return value.rstrip("/")


def _no_password(value: str) -> str:
    if re.search(r"://[^/]*@", value):
        raise ValueError("holds a user or a password: GITHUB_TOKEN is the place for a credential")
    return value


def _not_placeholder(value: str) -> str:
    if re.fullmatch(r"your[_-].*", value, re.IGNORECASE):
        raise ValueError("is still the placeholder of the example file")
    return value


def _token(value: SecretStr) -> SecretStr:
    _not_placeholder(value.get_secret_value())
    return value


def _absolute(value: Path) -> Path:
    return PROJECT / value.expanduser()  # the same folder wherever the process is started


def _words(value: Any) -> Any:
    return tuple(filter(None, re.split(r"[,\s]+", value))) if isinstance(value, str) else value


def _networks(value: tuple[str, ...]) -> tuple[str, ...]:
    for word in value:
        if word != "*":
            ipaddress.ip_network(word, strict=False)  # its ValueError names the word
    return value


Token = Annotated[SecretStr, AfterValidator(_token)]
Url = Annotated[str, AfterValidator(_url)]
Folder = Annotated[Path, AfterValidator(_absolute)]
Name = Annotated[str, Field(pattern=r"^[\w.\-]+$"), AfterValidator(_not_placeholder)]
Repository = Annotated[str, Field(pattern=r"^[\w.\-]+/[\w.\-]+$")]
Remote = Annotated[str, AfterValidator(_no_password)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Networks = Annotated[tuple[str, ...], BeforeValidator(_words), AfterValidator(_networks)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
