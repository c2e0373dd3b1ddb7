"""The doctor's checks of settings, fork, wallet, API, token and chain, with a remedy each."""

from __future__ import annotations

import importlib.util
import shlex
import time
from collections.abc import Iterator

import httpx

from harness.imports import install_command
from harness.measuring.runner import MeasurementError, check_import
from harness.source import missing_files
from neurons.miner.command_line.machine_checks import Finding, failure, machine, ok, warning
from neurons.miner.command_line.update import REMEDY, newer_commit
from neurons.miner.measuring import describe_machine
from neurons.miner.publishing.from_settings import open_fork, upstream_address
from neurons.miner.publishing.github import check_token
from neurons.miner.targets import targets_here, targets_to_try
from neurons.runtime import identity
from neurons.runtime.errors import ConfigError, Fault, Held, QuasarError, Retry
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
        yield scope(settings, embedded=True)
        yield fork(settings)
        return
    yield from environment_file(settings)
    yield target(settings)
    yield scope(settings, embedded=False)
    yield publishing(settings)
    if settings.repo_path is None:
        yield upstream(settings)
    yield fork(settings)
    yield from wallet(settings)
    yield from api(settings)
    if settings.github_token is not None and not (settings.fork_remote or settings.repo_path):
        yield token(settings)
    yield registration(settings)
    yield update()


def environment_file(settings: Settings) -> Iterator[Finding]:
    """Check the .env for suspicious lines; its values were checked when it was read."""
    for problem, remedy in settings.warnings:
        yield warning(".env", problem, remedy or "Remove the line from .env.")
    if not settings.warnings:
        yield ok(".env", "all lines are valid, and no other user can read it")


def update() -> Finding:
    commit = newer_commit()
    if commit is None:
        return ok("update", "no newer commit is known")
    return warning("update", f"commit {commit[:12]} is newer than this checkout", REMEDY)


def target(settings: Settings) -> Finding:
    """Check that the target can be measured here, since only measured lengths are claimed."""
    length = settings.target_sequence_length
    wanted = None if length == "auto" else length
    try:
        targets = targets_to_try(wanted, settings.device)
        if settings.device == "cuda":  # as the miner decides, for the GPU that CUDA shows first
            targets = targets_here(wanted, describe_machine(settings.device), settings)
    except Fault as fault:
        return failure("target", fault.reason, fault.remedy)
    best = "the best up to " if length == "auto" else ""
    return ok("target", f"{best}{targets[0]:,} tokens, measured on {settings.device}")


def publishing(settings: Settings) -> Finding:
    """Check that the names of fork and branch, or the checkout at REPO_PATH, can be used."""
    try:
        named = open_fork(settings)
        if settings.repo_path is None:
            return ok("publishing", f"the branch {settings.fork_branch}")
        return ok("publishing", f"the branch {named.branch} of {named.url}")
    except ConfigError as error:
        return failure("publishing", *error.problems[0])
    except Held as held:
        return failure("publishing", held.reason, held.remedy)


def upstream(settings: Settings) -> Finding:
    address = upstream_address(settings)
    try:
        remote = parse_remote(address)
        git = HardenedGit(PROJECT, timeout=HTTP_SECONDS)
        git.online(remote, None, "ls-remote", "--exit-code", "--", remote.url, "HEAD")
    except (QuasarError, ValueError) as error:
        # the remedy of a Held names settings of the fork, not of the upstream
        why = error.reason if isinstance(error, Held) else str(error)
        detail = f"{redact_text(address)} cannot be reached: {redact_text(why)}"
        return failure(
            "upstream", detail, "Check the network, GITHUB_UPSTREAM and FORK_UPSTREAM_URL."
        )
    return ok("upstream", f"{remote.public_url} can be reached")


def scope(settings: Settings, *, embedded: bool) -> Finding:
    if settings.fork_scope == "layer":
        return ok("scope", "publishes the operator and the layer")
    if embedded:
        detail = "FORK_SCOPE=ops, but the fork on this machine has no layer."
        return failure("scope", detail, "Unset it.")
    return ok("scope", "publishes fla/ops/quasar alone; the fork's own layer is measured")


def fork(settings: Settings) -> Finding:
    """Check in a child process that the fork's code can be imported."""
    tree = settings.repo_path or settings.state_dir / "fork"
    try:
        absent = missing_files(tree)
    except PermissionError as error:
        setting = "REPO_PATH" if settings.repo_path else "STATE_DIR"
        remedy = f"Give it to this user, or set another {setting}."
        return failure("fork", f"{tree} cannot be read ({error.strerror})", remedy)
    if absent:
        needed = sorted({module.split(".")[0] for module in fork_imports()})
        for module in needed:
            if importlib.util.find_spec(module) is None:
                detail = f"it needs {module}, which is not installed"
                return failure("fork", detail, f"Run {install_command(module)}.")
        have = ", ".join(needed)
        detail = f"checked after cloning; the packages that it needs are installed: {have}"
        return ok("fork", detail)
    try:
        seconds = check_import(tree)
    except MeasurementError as error:
        own_words = (
            f"`python -m harness --tree {shlex.quote(str(tree))}` shows the process's output."
        )
        detail = f"{tree} cannot be imported: {error.reason}"
        return failure("fork", detail, error.remedy or own_words)
    return ok("fork", f"imported from {tree} in {seconds:.1f} s")


def wallet(settings: Settings) -> Iterator[Finding]:
    try:
        me = identity.load_identity(*settings.miner_wallet)
    except ConfigError as error:
        yield from (failure("wallet", *one) for one in error.problems)
        return
    yield ok("wallet", f"hotkey {me.hotkey}")
    yield from (warning("wallet", *one) for one in identity.wallet_warnings(*settings.miner_wallet))


def api(settings: Settings) -> Iterator[Finding]:
    """Check that the API serves this competition, and compare its clock with this machine's."""
    url = str(settings.validator_api_url)
    try:
        health, begin = _get(f"{url}/health")
        route, _ = _get(f"{url}/commit_submission")
    except ConfigError as error:
        yield from (failure("api", *one) for one in error.problems)
        return
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
    """Return a reply and the begin of its body, because an unknown server may send any amount."""
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
        detail = f"unknown whether {url} serves this competition: /commit_submission is {route}"
        return warning("api", detail, f"Check VALIDATOR_API_URL. {KNOWN}")
    return ok("api", f"{url} is up and serves this competition")


def token(settings: Settings) -> Finding:
    secret = settings.github_token.get_secret_value() if settings.github_token else ""
    try:
        scopes = check_token(settings.github_api_url, secret, settings.github_username or "")
    except Held as held:
        return failure("token", held.reason, held.remedy)
    except Retry as fault:
        detail = f"GitHub does not answer as it should: {fault.reason}"
        return failure("token", detail, "Check the network.")
    except ConfigError as error:
        return failure("token", *error.problems[0])
    owner = settings.github_username
    if scopes is None:  # GitHub does not report the permissions of a fine-grained token
        return ok("token", f"fine-grained token of {owner}; Contents and Administration must be on")
    return ok("token", f"classic token of {owner} with {', '.join(sorted(scopes))}")


def registration(settings: Settings) -> Finding:
    if settings.subtensor_network == identity.OFFLINE:
        return ok("registration", "not looked up: SUBTENSOR_NETWORK=offline")
    try:
        hotkey = identity.load_identity(*settings.miner_wallet).hotkey
        uid = identity.registered_uid(
            hotkey, settings.netuid, settings.subtensor_network, CHAIN_SECONDS
        )
    except ConfigError:
        return warning("registration", "unknown without a hotkey", "See the wallet's line.")
    except identity.ChainUnreachable as error:
        return warning("registration", str(error), "Check SUBTENSOR_NETWORK; mining continues.")
    if uid is None:
        detail = f"{hotkey} is not on subnet {settings.netuid}; {identity.IF_SERVED}"
        return warning("registration", detail, identity.registration_command(settings))
    return ok("registration", f"uid {uid} on subnet {settings.netuid}")
