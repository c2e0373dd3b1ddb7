"""The miner's fork: clone, branch, overlay, commit, push, and a check that it can be cloned.

GitHub, another https host, a file:// address and a path use the same code. The commit contains the
overlay byte for byte: objects are written without filters, hooks or signatures. A branch is never
overwritten.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from harness.terminal import counted
from neurons.miner.publishing.overlay import Overlay
from neurons.runtime.errors import ConfigError, Held, Problem
from neurons.runtime.git.checkout import (
    changed_files,
    checkout_branch,
    checkout_config,
    checkout_origin,
)
from neurons.runtime.git.clone import (
    anonymous,
    check_out,
    fetch_branch,
    is_clone,
    is_damaged,
    is_fetchable,
    make_clone,
    make_remote,
    move_away,
    public_address,
    public_heads,
    read_heads,
    remove_locks,
)
from neurons.runtime.git.command import HardenedGit
from neurons.runtime.git.faults import HostRefused, disk_faults
from neurons.runtime.git.remote import Remote, Token, named_remote, parse_remote
from quasar_kernels.contract import Scope, check_tree

Method = TypeVar("Method", bound=Callable[..., object])


def _with_sound_clone(method: Method) -> Method:
    """Run a method of `Fork`; if it fails on a damaged clone, run it again on a new clone."""

    @functools.wraps(method)
    def run(self: Fork, *args: object) -> object:
        try:
            return method(self, *args)
        except HostRefused:
            raise
        except Held:
            # a checkout at REPO_PATH is never replaced
            if not (self._own and self.worktree.is_dir() and is_damaged(self._git)):
                raise
        move_away(self.worktree)
        return method(self, *args)

    return cast(Method, run)


class Fork:
    """One branch of one fork, and the worktree that holds it.

    Every method may be called again at any time, also after a crash in the middle of it. Methods
    raise Held for faults that the operator must correct, and Retry for temporary ones. The
    constructor raises a ConfigError for an address or a branch that cannot be used.

    Args:
        remote_url: the fork's address; None with `repo_path`: its `origin` is then the fork.
        upstream_url: the repository that provides the history if the fork is empty or missing.
        worktree: the folder of the miner's own clone.
        branch: the branch that carries the kernels; a checkout's own branch with `repo_path`.
        token: sent to its host alone, through the environment of the git calls that need it.
        repo_path: an existing checkout to use instead of a clone.
        create: makes the fork at its host when this machine has no clone of it yet.
        scope: `layer` for the operator and the layer, `ops` for the operator alone.
        stop: when set, a running git call ends with Retry.
        overlay: returns the folder of the kernels to publish; None for the shipped ones.
    """

    def __init__(
        self,
        remote_url: str | None,
        upstream_url: str | None,
        worktree: Path,
        branch: str = "quasar",
        *,
        token: Token | None = None,
        repo_path: Path | None = None,
        create: Callable[[], object] | None = None,
        scope: Scope = "layer",
        stop: threading.Event | None = None,
        overlay: Callable[[], Path] | None = None,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][\w.\-/]*(?<![./])", branch) or ".." in branch:
            problem = f"FORK_BRANCH={branch!r} is not a valid branch name."
            raise ConfigError(Problem(problem, "Use one like `quasar`."))
        if remote_url is None and repo_path is None:
            raise ConfigError("No fork is named. Set GITHUB_USERNAME, FORK_REMOTE or REPO_PATH.")
        self._own = repo_path is None
        self._named_remote: Remote | None = None
        if remote_url is not None and self._own:
            self._named_remote = named_remote(remote_url, "FORK_REMOTE")
        self._upstream = named_remote(upstream_url, "FORK_UPSTREAM_URL") if upstream_url else None
        self.worktree = Path(repo_path or worktree).absolute()
        self._branch_name, self._token = branch, token
        self._stop, self._create = stop, create
        self._overlay = Overlay(scope, overlay)

    @property
    def url(self) -> str:
        """The exact address that is submitted, without a trailing slash or credentials."""
        return self._remote.public_url

    @property
    def branch(self) -> str:
        if self._own:
            return self._branch_name
        return checkout_branch(self._git)

    @_with_sound_clone
    @disk_faults()
    def prepare(self) -> None:
        """Bring the worktree to the branch's tip, copy the overlay over it, check the rules."""
        if self._is_lost():
            self._make_clone()
        tip = self._tip()
        if self._own:
            check_out(self._git, self.branch, tip)
        else:
            if self._git.probe("cat-file", "-e", f"{tip}:fla") is None:
                raise Held(
                    f"REPO_PATH={self.worktree} is not a checkout of flash-linear-attention.",
                    "Set it to the folder of your fork's checkout, or unset it.",
                )
            self._overlay.refuse_dirty(self._git, tip)
        self._overlay.lay(self._git, tip)
        violations = check_tree(self.worktree)
        if violations:
            raise Held(
                f"The fork breaks {counted(len(violations), 'rule')} that validators check: "
                + " ".join(map(str, violations)),
                "Correct the files that are named, then start again.",
            )

    @_with_sound_clone
    def commit(self) -> str:
        """Commit the overlay on the branch; return the full hash, the same for the same content."""
        if self._is_lost():
            self.prepare()
        tool, branch = self._git, self.branch
        tip = self._local_tip()
        if tip is None:
            raise Held(f"The branch {branch} does not exist.", "Start again: the miner creates it.")
        if self._own:
            tool.read_tree(tip)
        else:
            self._overlay.refuse_dirty(tool, tip)
        commit = self._overlay.commit(tool, tip)
        if commit != tip:
            tool.update_ref(f"refs/heads/{branch}", commit, tip)
        tool.probe("update-index", "-q", "--refresh")
        dirty = changed_files(tool)
        if dirty:
            raise Held(
                f"The worktree differs from the commit: {', '.join(dirty[:10])}.",
                f"Undo the changes in {self.worktree}, then start again.",
            )
        return commit

    @_with_sound_clone
    def push(self, commit: str) -> None:
        """Make `commit` the tip of the remote's branch; never overwrite others' commits."""
        self._restore()
        remote, branch = self._remote, self.branch
        tool, source, token, heads, _ = self._read()
        there = heads.get(branch)
        if there == commit:
            return
        if self._git.probe("cat-file", "-e", f"{commit}^{{commit}}") is None:
            raise Held(
                f"The commit {commit} is not in {self.worktree}.", "Publish and submit again."
            )
        if there is not None:
            fetch_branch(tool, source, token, branch, there)
            if self._contains(there, commit):
                return
            if not self._contains(commit, there):
                raise self._moved(there, commit)
        self._git.online(
            remote,
            self._token,
            "push",
            *("--no-verify", "--no-signed", "--no-follow-tags"),
            *("--recurse-submodules=no", "--", remote.url, f"{commit}:refs/heads/{branch}"),
        )

    @_with_sound_clone
    def verify(self, commit: str) -> None:
        """Check that validators can fetch `commit` and that it holds the overlay's bytes.

        The branch may contain later commits, because a validator checks the commit out by its hash.
        """
        self._restore()
        branch = self.branch
        there = public_heads(self._git, self._remote, self._token).get(branch)
        if there is None:
            raise Held(
                f"The branch {branch} is not on {self.url}.",
                "Push it again; a validator cannot clone the commit.",
            )
        fetch_branch(anonymous(self._git), public_address(self._remote), None, branch, there)
        if there != commit and not self._contains(there, commit):
            raise self._moved(there, commit)
        wrong = self._overlay.differing(self._git, commit)
        if wrong:
            raise Held(
                f"The commit {commit} does not hold the overlay's content: {', '.join(wrong)}.",
                "Publish and submit again.",
            )

    @disk_faults()
    def check_public(self) -> None:
        """Check that validators can read the repository; it may still lack the commit."""
        public_heads(self._git, self._remote, self._token)

    @disk_faults()
    def serves(self, url: str, commit: str) -> bool:
        """Return whether validators can fetch `commit` from `url`, whatever its branches contain.

        `url` may be an earlier address of this fork, for example before its account was renamed.
        """
        # this git ignores the checkout's configuration: a lost checkout must not prevent a reveal
        return is_fetchable(HardenedGit(self.worktree, stop=self._stop), parse_remote(url), commit)

    # The remote and the clone

    @functools.cached_property
    def _remote(self) -> Remote:
        if self._named_remote is not None:
            return self._named_remote
        return checkout_origin(self._git, with_token=self._token is not None)

    @property
    def _git(self) -> HardenedGit:
        tool = HardenedGit(self.worktree, stop=self._stop)
        if not self._own:
            tool.overrides = checkout_config(tool)
        return tool

    def _is_lost(self) -> bool:
        return self._own and not is_clone(self._git, self._remote)

    def _restore(self) -> None:
        """Clone again if the clone is lost; unchanged kernels then give the same commit.

        Also remove what a killed git left in the clone.
        """
        if self._is_lost():
            self.prepare()
            self.commit()
        elif self._own:
            remove_locks(self._git)

    def _make_clone(self) -> None:
        remote = self._remote
        if self._create is not None:
            self._create()
        elif remote.protocol == "file" and not remote.path.exists() and self._upstream:
            make_remote(self._upstream.url, remote.path)
        if self._token is not None:
            with contextlib.suppress(HostRefused):
                make_clone(anonymous(self._git), remote, None, self.branch)
                return
        make_clone(self._git, remote, self._token, self.branch)

    # The branch

    def _read(self) -> tuple[HardenedGit, Remote, Token | None, dict[str, str], str]:
        """Return a git, address and token that can read the remote, its branches and its default.

        Anonymous access comes first: an expired token must not delay a public fork.
        """
        if self._token is not None:
            tool = anonymous(self._git)
            with contextlib.suppress(HostRefused):
                return tool, self._remote, None, *read_heads(tool, self._remote, None)
        heads = read_heads(self._git, self._remote, self._token)
        return self._git, self._remote, self._token, *heads

    def _local_tip(self) -> str | None:
        return self._git.probe("rev-parse", "--verify", "--quiet", f"refs/heads/{self.branch}")

    def _contains(self, newer: str, older: str) -> bool:
        return self._git.probe("merge-base", "--is-ancestor", older, newer) is not None

    def _tip(self) -> str:
        """Return the commit on top of which the overlay is committed."""
        branch = self.branch
        tool, remote, token, heads, default = self._read()
        remote_tip, local_tip = heads.get(branch), self._local_tip()
        if remote_tip is not None:
            fetch_branch(tool, remote, token, branch, remote_tip)
        if local_tip is None:
            return remote_tip or self._first_tip(tool, token, heads, default)
        if remote_tip is None or self._contains(local_tip, remote_tip):
            return local_tip
        if not self._contains(remote_tip, local_tip):
            raise self._moved(remote_tip, local_tip)
        if not self._own:
            raise Held(
                f"REPO_PATH={self.worktree} is behind its remote.",
                "Run `git pull --ff-only` in that checkout.",
            )
        return remote_tip

    def _first_tip(
        self, tool: HardenedGit, token: Token | None, heads: dict[str, str], default: str
    ) -> str:
        """Return a new branch's first commit: the fork's default branch, else the upstream's."""
        remote, namespace = self._remote, "origin"
        if not heads and self._upstream is not None:
            tool, remote, token, namespace = self._git, self._upstream, None, "upstream"
            heads, default = read_heads(tool, remote, token)
        if not heads:
            raise Held(
                f"The repository {remote.public_url} is empty.",
                "Make it a fork of the upstream, or set FORK_UPSTREAM_URL.",
            )
        fetch_branch(tool, remote, token, default, heads[default], namespace)
        return heads[default]

    def _moved(self, there: str, commit: str) -> Held:
        return Held(
            f"The branch {self.branch} of {self._remote.public_url} is at {there[:12]}, not at the "
            f"commit {commit[:12]}: another client moved it.",
            f"Put it back (git push <remote> {commit}:refs/heads/{self.branch}) if the commit is "
            "to count, or set FORK_BRANCH to a new name. Nothing was overwritten.",
        )
