"""Opens the fork that the settings name; at GitHub, checks the token and creates the fork.

Waits can be interrupted. The end of a rate limit is computed with GitHub's clock.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from neurons.miner.publishing.fork import Fork
from neurons.miner.publishing.tuned_kernels import TunedKernels
from neurons.runtime.errors import ConfigError, Held, Problem, Retry
from neurons.runtime.git.faults import SCOPE_REMEDY
from neurons.runtime.git.remote import Token
from neurons.runtime.network import client_options, failure_reason
from neurons.runtime.observe import redact_text, register_secret
from neurons.runtime.settings import Settings
from neurons.runtime.values import LOOPBACK
from neurons.wire.connection import TimeLimit
from neurons.wire.outcomes import http_date, retry_after

MAX_REQUEST_SECONDS = 60.0
"""Limit in seconds on a whole request."""
MAX_WAIT = 3600.0
"""Limit in seconds on a wait that GitHub requests."""

_FORK_REMEDY = (
    "Create the fork by hand on the upstream's page at GitHub, or use a classic token with the "
    "scope `public_repo` (a fine-grained one needs Administration: read and write)."
)


def web_address(api_url: str) -> str:
    """Return the web address of an API's repositories, without a trailing slash."""
    parts = urlsplit(api_url)
    host = "github.com" if parts.netloc == "api.github.com" else parts.netloc
    return f"{parts.scheme}://{host}"


def upstream_address(settings: Settings) -> str:
    at_github = f"{web_address(settings.github_api_url)}/{settings.github_upstream}.git"
    return settings.fork_upstream_url or at_github


def open_fork(settings: Settings, *, stop: threading.Event | None = None) -> Fork:
    """Return the fork at REPO_PATH, else at FORK_REMOTE, else at GitHub."""
    remote, web = settings.fork_remote, web_address(settings.github_api_url)
    secret = settings.github_token.get_secret_value() if settings.github_token else ""
    create: Callable[[], str] | None = None
    if settings.repo_path is None and remote is None:
        owner, name = settings.github_username, settings.github_fork_name
        if not owner or not secret:
            raise ConfigError("GITHUB_USERNAME and GITHUB_TOKEN are needed to publish at GitHub.")
        remote = f"{web}/{owner}/{name}.git"
        api, parent = settings.github_api_url, settings.github_upstream

        def create() -> str:  # a partial's `repr` would show the token
            return ensure_fork(api, parent, owner, name, secret, stop=stop)

    return Fork(
        remote,
        upstream_address(settings),
        settings.state_dir / "fork",
        settings.fork_branch,
        token=Token(secret, urlsplit(web).netloc.lower()) if secret else None,
        repo_path=settings.repo_path,
        create=create,
        scope=settings.fork_scope,
        stop=stop,
        overlay=TunedKernels(settings.state_dir, settings.fork_scope).root,
    )


def check_token(api_url: str, token: str, owner: str) -> frozenset[str] | None:
    """Return the scopes of a classic token; None for a fine-grained one, which has none.

    Raises Held if GitHub rejects the token, it belongs to another account, or it may not push;
    Retry if GitHub cannot be reached; and a ConfigError if the API's address is not https.
    """
    with _Session(api_url, token) as session:
        return _check_token(session, owner)


def ensure_fork(
    api_url: str,
    upstream: str,
    owner: str,
    fork_name: str,
    token: str,
    *,
    stop: threading.Event | None = None,
    first_wait: float = 1.0,
    patience: float = 600.0,
) -> str:
    """Find or request the fork `owner/fork_name` of `upstream`; return its clone address.

    GitHub creates forks asynchronously: this function polls at intervals that double, from
    `first_wait` seconds, for `patience` seconds. Raises Held if the token, account or upstream is
    wrong, or the name is taken, and Retry if GitHub does not answer or has not finished.
    """
    stop = stop or threading.Event()
    with _Session(api_url, token) as session:
        _check_token(session, owner)
        source = session.repository(upstream)
        if source is None:
            raise Held(
                f"GitHub shows no repository {upstream}.",
                "Correct GITHUB_UPSTREAM; a private repository needs a token that can read it.",
            )
        name = f"{owner}/{fork_name}"
        fork = session.repository(name)
        if fork is None:
            _request_fork(session, upstream, name)
        if fork is None or not fork.get("default_branch"):
            fork = _await_fork(session, name, stop, first_wait, patience)
        _check_fork(fork, source, name)
        url = str(fork.get("clone_url"))
        if urlsplit(url).netloc != urlsplit(web_address(api_url)).netloc:
            problem = f"GitHub's address of the fork is at another host: {redact_text(url)}."
            raise Held(problem, "Check GITHUB_API_URL.")
        return url


class _Session(httpx.Client):
    """A connection to the API; `call` raises Held or Retry for every error response."""

    def __init__(self, api_url: str, token: str) -> None:
        parts = urlsplit(api_url)
        if parts.scheme != "https" and parts.hostname not in LOOPBACK:
            problem = f"GITHUB_API_URL={api_url} is not https: the token would be readable."
            raise ConfigError(Problem(problem, "Set it to an https address."))
        register_secret(token)
        headers = {
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {token}",
            "X-GitHub-Api-Version": "2022-11-28",
            "User-Agent": "quasar-miner",
        }
        # Redirects are not followed: the token is for this host.
        super().__init__(
            base_url=api_url.rstrip("/"), headers=headers, timeout=30.0, **client_options(api_url)
        )
        self._time_limit = TimeLimit()

    def call(
        self, method: str, path: str, *, body: object = None, allow: tuple[int, ...] = ()
    ) -> httpx.Response:
        try:
            with self._time_limit.within(MAX_REQUEST_SECONDS):
                extensions = {"trace": self._time_limit}
                reply = self.request(method, path, json=body, extensions=extensions)
        except httpx.HTTPError as error:
            raise Retry(f"GitHub cannot be reached: {failure_reason(error)}.") from None
        if reply.is_success or reply.status_code in allow:
            return reply
        raise _fault(reply, f"{method} {path}")

    def repository(self, name: str) -> dict[str, Any] | None:
        reply = self.call("GET", f"/repos/{name}", allow=(404,))
        return None if reply.status_code == 404 else _content(reply)


def _content(reply: httpx.Response) -> dict[str, Any]:
    try:
        content = reply.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise Retry(f"GitHub's answer to {reply.request.url.path} is not a JSON object.")
    return content


def _message(reply: httpx.Response) -> str:
    try:
        return redact_text(str(reply.json()["message"]))
    except (ValueError, KeyError, TypeError):
        return reply.reason_phrase


def _fault(reply: httpx.Response, request: str) -> Held | Retry:
    status, message = reply.status_code, _message(reply)
    limited = reply.headers.get("X-RateLimit-Remaining") == "0" or "rate limit" in message.lower()
    if status == 429 or (status == 403 and (limited or "Retry-After" in reply.headers)):
        return Retry(f"GitHub limits the rate ({request}): {message}", after=_pause(reply))
    if status >= 500 or status == 408:
        return Retry(f"GitHub failed ({request}): {status} {message}", after=_pause(reply))
    if status == 401:
        return Held(f"GitHub does not accept the token: {message}.", SCOPE_REMEDY)
    if status == 403:
        return Held(f"GitHub does not allow {request}: {message}.", SCOPE_REMEDY)
    if reply.is_redirect:
        return Held(
            f"GitHub redirects {request}: the repository or account was renamed.",
            "Set GITHUB_UPSTREAM, GITHUB_USERNAME and GITHUB_FORK_NAME to the present names.",
        )
    return Held(f"GitHub refused {request}: {status} {message}.", _FORK_REMEDY)


def _pause(reply: httpx.Response) -> float | None:
    """Return the seconds to wait by GitHub's headers; None without such a header."""
    now = http_date(reply.headers.get("Date", "")) or time.time()
    reset = reply.headers.get("X-RateLimit-Reset", "")
    seconds = retry_after(reply.headers.get("Retry-After"), now)
    if seconds is None and re.fullmatch(r"\d{1,12}", reset) and reply.status_code < 500:
        seconds = float(reset) - now
    return None if seconds is None else min(max(seconds, 1.0), MAX_WAIT)


def _check_token(session: _Session, owner: str) -> frozenset[str] | None:
    user = session.call("GET", "/user")
    header = user.headers.get("X-OAuth-Scopes")
    scopes = None if header is None else frozenset(filter(None, map(str.strip, header.split(","))))
    if scopes is not None and not scopes & {"repo", "public_repo"}:
        raise Held(
            f"The token has the scopes {', '.join(sorted(scopes)) or '(none)'}, which do not "
            "allow a push.",
            SCOPE_REMEDY,
        )
    login = str(_content(user).get("login"))
    if login.lower() != owner.lower():
        raise Held(
            f"The token belongs to {redact_text(login)}, and GITHUB_USERNAME is {owner}.",
            "Set GITHUB_USERNAME to the token's account, or use that account's token.",
        )
    return scopes


def _request_fork(session: _Session, upstream: str, name: str) -> None:
    body = {"name": name.partition("/")[2], "default_branch_only": False}
    reply = session.call("POST", f"/repos/{upstream}/forks", body=body)
    full_name = str(_content(reply).get("full_name", name))
    if full_name.lower() != name.lower():  # an account can have one fork of a repository
        raise Held(
            f"The account has a fork of {upstream} already: {redact_text(full_name)}.",
            f"Set GITHUB_FORK_NAME={redact_text(full_name.partition('/')[2])}.",
        )


def _await_fork(
    session: _Session, name: str, stop: threading.Event, wait: float, patience: float
) -> dict[str, Any]:
    waited = 0.0
    while waited < patience:
        if stop.wait(wait):
            raise Retry("Stopped while GitHub creates the fork.")
        waited += wait
        fork = session.repository(name)
        if fork is not None and fork.get("default_branch"):
            return fork
        wait = min(2 * wait, 30.0)
    raise Retry(f"GitHub is still creating the fork {name}.", after=60.0)


def _check_fork(fork: dict[str, Any], source: dict[str, Any], name: str) -> None:
    """Raise Held unless this is a usable fork of the upstream's network."""
    if _network(fork) != _network(source):
        raise Held(
            f"The repository {name} exists but is not a fork of {source.get('full_name')}.",
            "Set GITHUB_FORK_NAME to a name that is free, or rename that repository.",
        )
    if fork.get("archived") or fork.get("disabled"):
        raise Held(f"The fork {name} is archived or disabled.", "Unarchive it at GitHub.")
    if fork.get("permissions", {}).get("push") is False:
        raise Held(f"The token may not push to {name}.", SCOPE_REMEDY)


def _network(repository: dict[str, Any]) -> str:
    root = repository.get("source") or repository.get("parent") or repository
    return str(root.get("full_name")).lower()
