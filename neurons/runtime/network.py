"""Reads the environment's proxies and certificates for calls to other hosts.

httpx can do this itself, but it fails with a traceback at values that curl and git accept, such as
`[::1]` in NO_PROXY, and reads SSL_CERT_FILE also for calls without TLS.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import ssl
import urllib.request
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from neurons.runtime.addresses import parse_ip, require_host
from neurons.runtime.errors import ConfigError, Problem
from neurons.runtime.loading import environment
from neurons.runtime.values import LOOPBACK

PORTS = {"http": 80, "https": 443}


def client_options(url: str) -> dict[str, Any]:
    """Return the arguments of an httpx client that calls only the host of `url`.

    Raises a ConfigError if a variable of the environment that it needs is not valid.
    """
    parts = urlsplit(url)
    proxy = None if parts.hostname in LOOPBACK else _proxy(parts)
    verify = certificates() if parts.scheme == "https" else False
    return {"trust_env": False, "verify": verify, "proxy": proxy}


@functools.cache
def certificates() -> ssl.SSLContext:
    """Return the trusted certificates, read once, because that takes a tenth of a second.

    SSL_CERT_FILE and SSL_CERT_DIR replace the certificates of the package certifi. Raises a
    ConfigError if they name none.
    """
    file, folders = (environment().get(name, "") for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    reason = ""
    if not file and folders and not any(map(os.path.isdir, folders.split(os.pathsep))):
        reason = f"SSL_CERT_DIR={folders} does not name a folder"
    try:
        context = httpx.create_ssl_context()
    except OSError as error:  # ssl.SSLError is one
        detail = error.strerror if not isinstance(error, ssl.SSLError) else "no PEM certificates"
        reason = f"SSL_CERT_FILE={file} cannot be read ({detail})"
    if reason:
        raise ConfigError(Problem(reason, "name the trusted certificates, or unset the variable."))
    return context


def failure_reason(error: httpx.HTTPError) -> str:
    """Return why an exchange failed; for a certificate that is not trusted, return TLS's reason."""
    untrusted = untrusted_certificate(error)
    if untrusted is not None:
        return f"its certificate is not trusted: {untrusted.verify_message}"
    return f"{type(error).__name__}: {error}".rstrip(": ")


def untrusted_certificate(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """Return the untrusted certificate's error among the causes of `error`, or None."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _proxy(url: SplitResult) -> httpx.Proxy | None:
    variables = environment()
    kinds = (f"{url.scheme}_proxy", "all_proxy")
    names = [name for kind in kinds for name in (kind, kind.upper()) if variables.get(name)]
    if not names or _is_excepted(url, variables.get("no_proxy") or variables.get("NO_PROXY", "")):
        return None
    value = variables[names[0]]
    address = value if "://" in value else f"http://{value}"
    kind = address.partition("://")[0].lower()
    try:
        require_host(address)
        if kind in ("http", "https"):
            context = certificates() if kind == "https" else None
            return httpx.Proxy(address, ssl_context=context)
    except (ValueError, httpx.InvalidURL):
        pass
    # the value may contain a password
    reason = "does not have the form http://host:port"
    if kind.startswith("socks"):
        reason = "is a SOCKS proxy, which is not supported"
    elif kind not in ("http", "https") and re.fullmatch("[a-z0-9+.-]+", kind):
        reason = f"has the scheme {kind}"
    remedy = "give the address of an HTTP proxy, or unset the variable."
    raise ConfigError(Problem(f"{names[0]} {reason}", remedy))


def _is_excepted(url: SplitResult, exceptions: str) -> bool:
    """Return whether NO_PROXY excepts a host, by its name, a domain, an address or a network.

    A name may begin with `*.` and end with a port.
    """
    host, port = url.hostname or "", url.port or PORTS[url.scheme]
    address = parse_ip(host)
    for word in exceptions.split(",") if address else ():
        try:
            if address in ipaddress.ip_network(word.strip().strip("[]"), strict=False):
                return True
        except ValueError:
            continue  # a name
    names = re.sub(r"(^|,)\s*\*\.", r"\1.", exceptions)
    bypasses = urllib.request.proxy_bypass_environment  # type: ignore[attr-defined] # it exists
    return bool(bypasses(f"{host}:{port}", {"no": names}))
