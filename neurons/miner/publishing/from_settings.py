"""Opens the fork that the settings name; creates it at GitHub if they name no other place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from neurons.miner.publishing.fork import Fork
from neurons.miner.publishing.github import ensure_fork, web_address
from neurons.miner.publishing.tuned_kernels import TunedKernels
from neurons.runtime.errors import ConfigError
from neurons.runtime.git.remote import Token
from neurons.runtime.settings import Settings


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
