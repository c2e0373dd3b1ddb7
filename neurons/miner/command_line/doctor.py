"""The doctor's checks of settings, fork, wallet, API, token and chain, with a remedy each."""

from __future__ import annotations

import importlib.util
import shlex
import time
from collections.abc import Callable, Iterator

import httpx

from harness.imports import install_command
from harness.measuring.runner import MeasurementError, check_import
from harness.source import missing_files
from neurons.miner.command_line.machine_checks import Finding, failure, machine, ok, warning
from neurons.miner.measuring import describe_machine
from neurons.miner.publishing.github import check_token, open_fork, upstream_address
from neurons.miner.targets import targets_here, targets_to_try
from neurons.miner.watcher import UPDATE_REMEDY, newer_commit
from neurons.runtime import identity
from neurons.runtime.errors import ConfigError, Fault, Held, QuasarError
from neurons.runtime.git.command import HardenedGit
from neurons.runtime.git.remote import parse_remote
from neurons.runtime.network import client_options, failure_reason
from neurons.runtime.observe import redact_text
from neurons.runtime.settings import Settings
from neurons.runtime.values import PROJECT
from neurons.wire.client import ROUTE_STATUSES
from neurons.wire.outcomes import http_date
from quasar_kernels.contract import fork_imports

CLOCK_SECONDS = 30.0
HTTP_SECONDS = 10.0
CHAIN_SECONDS = 12.0
HEALTH_BYTES = 1000
KNOWN = "docs/operating.md says what is known about the subnet."


def examine(settings: Settings, *, embedded: bool) -> Iterator[Finding]:
    """Yield the finding of every check that applies; quick checks come first."""
    yield from machine(settings)
    if embedded:
        yield ok("settings", "no .env: the whole job runs on this machine (cp .env.example .env)")
        if settings.fork_scope == "ops":
            detail = "FORK_SCOPE=ops, but the fork on this machine has no layer."
            yield failure("scope", detail, "Unset it.")
        yield from fork(settings)
        return
    checks = (environment_file, target, scope, publishing, upstream, fork, wallet, api, token)
    for check in (*checks, registration, update):
        yield from guarded(check, settings)


def guarded(
    check: Callable[[Settings], Iterator[Finding]], settings: Settings
) -> Iterator[Finding]:
    """Yield a check's findings; turn an exception with a remedy into a failure."""
    try:
        yield from check(settings)
    except ConfigError as error:
        yield from (failure(check.__name__, *one) for one in error.problems)
    except Fault as fault:
        yield failure(check.__name__, fault.reason, fault.remedy or "Check the network.")


def environment_file(settings: Settings) -> Iterator[Finding]:
    """Check the .env for suspicious lines; its values were checked when it was read."""
    for problem, remedy in settings.warnings:
        yield warning(".env", problem, remedy or "Remove the line from .env.")
    if not settings.warnings:
        yield ok(".env", "all lines are valid, and no other user can read it")


def target(settings: Settings) -> Iterator[Finding]:
    """Check that the target can be measured on this machine: only measured lengths are claimed."""
    targets = targets_to_try(settings.target, settings.device)
    if settings.device == "cuda":  # by the memory of the GPU on which the miner measures
        targets = targets_here(settings.target, describe_machine(settings.device), settings)
    best = "the best up to " if settings.target is None else ""
    yield ok("target", f"{best}{targets[0]:,} tokens, measured on {settings.device}")


def scope(settings: Settings) -> Iterator[Finding]:
    if settings.fork_scope == "layer":
        yield ok("scope", "publishes the operator and the layer")
    else:
        yield ok("scope", "publishes fla/ops/quasar alone; the fork's own layer is measured")


def publishing(settings: Settings) -> Iterator[Finding]:
    """Check that the names of fork and branch, or the checkout at REPO_PATH, can be used."""
    named = open_fork(settings)
    place = f" of {named.url}" if settings.repo_path else ""
    yield ok("publishing", f"the branch {named.branch}{place}")


def upstream(settings: Settings) -> Iterator[Finding]:
    if settings.repo_path is not None:
        return
    address = upstream_address(settings)
    try:
        remote = parse_remote(address)
        git = HardenedGit(PROJECT, timeout=HTTP_SECONDS)
        git.online(remote, None, "ls-remote", "--exit-code", "--", remote.url, "HEAD")
    except (QuasarError, ValueError) as error:
        # `str` of a Held would add a remedy for the fork
        why = error.reason if isinstance(error, Held) else str(error)
        detail = f"{redact_text(address)} cannot be reached: {redact_text(why)}"
        remedy = "Check the network, GITHUB_UPSTREAM and FORK_UPSTREAM_URL."
        yield failure("upstream", detail, remedy)
    else:
        yield ok("upstream", f"{remote.public_url} can be reached")


def fork(settings: Settings) -> Iterator[Finding]:
    """Check in a child process that the fork's code can be imported."""
    tree = settings.repo_path or settings.state_dir / "fork"
    try:
        absent = missing_files(tree)
        seconds = 0.0 if absent else check_import(tree)
    except PermissionError as error:
        setting = "REPO_PATH" if settings.repo_path else "STATE_DIR"
        remedy = f"Give it to this user, or set another {setting}."
        yield failure("fork", f"{tree} cannot be read ({error.strerror})", remedy)
    except MeasurementError as error:
        command = f".venv/bin/python -m harness --tree {shlex.quote(str(tree))}"
        remedy = error.remedy or f"`{command}` shows the process's output."
        yield failure("fork", f"{tree} cannot be imported: {error.reason}", remedy)
    else:
        if not absent:
            yield ok("fork", f"imported from {tree} in {seconds:.1f} s")
            return
        needed = sorted({module.split(".")[0] for module in fork_imports()})
        missing = [one for one in needed if importlib.util.find_spec(one) is None]
        if missing:
            detail = f"it needs {missing[0]}, which is not installed"
            yield failure("fork", detail, f"Run {install_command(missing[0])}.")
        else:
            have = f"the packages that it needs are installed: {', '.join(needed)}"
            yield ok("fork", f"checked after cloning; {have}")


def wallet(settings: Settings) -> Iterator[Finding]:
    me = identity.load_identity(*settings.miner_wallet)
    yield ok("wallet", f"hotkey {me.hotkey}")
    yield from (warning("wallet", *one) for one in identity.wallet_warnings(*settings.miner_wallet))


def api(settings: Settings) -> Iterator[Finding]:
    """Check that the API serves this competition, and compare its clock with this machine's."""
    url = str(settings.validator_api_url)
    try:
        health, begin = _get(f"{url}/health")
        route, _ = _get(f"{url}/commit_submission")
    except httpx.HTTPError as error:
        detail = f"{url} does not answer ({failure_reason(error)})"
        yield failure("api", detail, "Check VALIDATOR_API_URL and the network.")
        return
    yield _competition(url, health.status_code, begin, route.status_code)
    there = http_date(health.headers.get("Date", ""))
    if there is None:
        return
    # The Date header counts whole seconds and was written up to one round trip ago.
    offset = time.time() - there
    detail = f"this machine's clock is {offset:+.0f} s from the server's"
    if abs(offset) > CLOCK_SECONDS:
        yield warning("clock", detail, "Switch on NTP: timedatectl set-ntp true")
    else:
        yield ok("clock", detail)


def _get(url: str) -> tuple[httpx.Response, bytes]:
    """Return a reply and its body's first bytes, because an unknown server may send any amount."""
    headers = {"Accept-Encoding": "identity"}
    options = client_options(url)
    with httpx.stream("GET", url, timeout=HTTP_SECONDS, headers=headers, **options) as reply:
        return reply, next(reply.iter_raw(HEALTH_BYTES), b"")


def _competition(url: str, health: int, begin: bytes, route: int) -> Finding:
    """Return what the replies for /health and GET /commit_submission say about a server."""
    serves = ROUTE_STATUSES.get(route)
    if serves is False:
        detail = f"{url} has no /commit_submission: it does not serve this competition"
        return failure("api", detail, f"Check VALIDATOR_API_URL. {KNOWN}")
    if health != 200:
        return failure("api", f"{url}/health answers {health}", "Check VALIDATOR_API_URL.")
    if not begin.lstrip().startswith(b"{"):
        detail = f"{url}/health is a page of another program, not the validator API's reply"
        return failure("api", detail, f"Check VALIDATOR_API_URL. {KNOWN}")
    if serves is None:
        detail = f"unknown whether {url} serves this competition: /commit_submission gave {route}"
        return warning("api", detail, f"Check VALIDATOR_API_URL. {KNOWN}")
    return ok("api", f"{url} is up and serves this competition")


def token(settings: Settings) -> Iterator[Finding]:
    if settings.github_token is None or settings.fork_remote or settings.repo_path:
        return
    owner, secret = settings.github_username or "", settings.github_token.get_secret_value()
    scopes = check_token(settings.github_api_url, secret, owner)
    if scopes is None:  # GitHub does not report the permissions of a fine-grained token
        detail = f"fine-grained token of {owner}; Contents and Administration must be on"
    else:
        detail = f"classic token of {owner} with {', '.join(sorted(scopes))}"
    yield ok("token", detail)


def registration(settings: Settings) -> Iterator[Finding]:
    network, netuid = settings.subtensor_network, settings.netuid
    hotkey = identity.public_hotkey(*settings.miner_wallet)
    if network == identity.OFFLINE:
        yield ok("registration", "not looked up: SUBTENSOR_NETWORK=offline")
    elif hotkey is None:
        yield warning("registration", "unknown without a hotkey", "See the wallet's line.")
    else:
        try:
            uid = identity.registered_uid(hotkey, netuid, network, CHAIN_SECONDS)
        except identity.ChainUnreachable as error:
            yield warning("registration", str(error), "Check SUBTENSOR_NETWORK; mining continues.")
            return
        if uid is None:
            detail = f"{hotkey} is not on subnet {netuid}; {identity.IF_SERVED}"
            yield warning("registration", detail, identity.registration_command(settings))
        else:
            yield ok("registration", f"uid {uid} on subnet {netuid}")


def update(_: Settings) -> Iterator[Finding]:
    commit = newer_commit()
    if commit is None:
        yield ok("update", "no newer commit is known")
    else:
        yield warning("update", f"commit {commit[:12]} is newer than this checkout", UPDATE_REMEDY)
