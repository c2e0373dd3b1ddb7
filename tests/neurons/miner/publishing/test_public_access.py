"""The fork is checked as validators read it: anonymously, over a real git server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from neurons.miner.publishing.fork import Fork
from neurons.runtime.errors import Held, Retry
from neurons.runtime.git.faults import HostRefused, PrivateFork
from neurons.runtime.git.remote import Token
from tests.git_server import GitServer, serving_git
from tests.neurons.miner.publishing.forks import MakeFork, commit_elsewhere, lay_out, publish
from tests.repositories import run_git


@pytest.fixture
def git(remote: Path) -> Iterator[GitServer]:
    with serving_git(remote.parent) as server:
        yield server


@pytest.fixture
def fork(git: GitServer, make_fork: MakeFork) -> Fork:
    token = Token("canary", git.url.removeprefix("http://"))
    return make_fork(f"{git.url}/remote.git", token=token)


@pytest.fixture(autouse=True)
def allow_pushes(remote: Path) -> None:
    run_git(remote, "config", "http.receivepack", "true")


def test_an_expired_token_does_not_prevent_the_reveal_of_a_public_commit(fork, git):
    commit = publish(fork)
    git.authorized = 401
    fork.push(commit)
    fork.verify(commit)


def test_an_expired_token_and_later_commits_do_not_prevent_the_reveal(fork, git, remote):
    commit = publish(fork)
    commit_elsewhere(remote, "quasar", {"a": "b"})
    git.authorized = 401
    fork.push(commit)
    fork.verify(commit)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_private_fork_is_refused(fork, git, status):
    git.anonymous = status
    commit = lay_out(fork)
    fork.push(commit)
    for check in (lambda: fork.verify(commit), fork.check_public):
        with pytest.raises(PrivateFork, match="Validators cannot read"):
            check()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_fork_that_the_token_cannot_read_either_is_not_called_private(fork, git, status):
    commit = publish(fork)
    git.anonymous = git.authorized = status
    with pytest.raises(HostRefused) as refusal:
        fork.verify(commit)
    assert not isinstance(refusal.value, PrivateFork), refusal.value


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overloaded_host_is_asked_again_later(fork, git, status):
    commit = publish(fork)
    git.anonymous = status
    for check in (lambda: fork.verify(commit), fork.check_public):
        with pytest.raises(Retry):
            check()


def test_a_renamed_account_does_not_prevent_the_reveal_and_gets_no_token(fork, git, remote):
    commit = publish(fork)
    remote.rename(remote.with_name("renamed.git"))
    git.renamed["remote.git"] = "renamed.git"
    git.credentials.clear()
    fork.push(commit)
    fork.verify(commit)
    assert git.credentials == []


def test_before_the_reveal_the_repository_is_checked_without_the_commit(fork):
    lay_out(fork)
    fork.check_public()


@pytest.mark.parametrize("change", ["overwritten", "deleted"])
def test_a_commit_without_a_branch_can_still_be_fetched_by_its_hash(fork, git, remote, change):
    commit = publish(fork)
    if change == "overwritten":
        commit_elsewhere(remote, "quasar", {"a": "b"}, "--force", amend=True)
    else:
        run_git(remote, "update-ref", "-d", "refs/heads/quasar")
    with pytest.raises(Held):
        fork.verify(commit)  # nothing new is committed to it
    git.credentials.clear()
    assert fork.serves(fork.url, commit)
    assert git.credentials == []


def test_a_commit_that_only_this_machine_has_is_not_served(fork):
    commit = lay_out(fork)
    assert not fork.serves(fork.url, commit)


def test_the_address_before_a_renaming_serves_the_commit(fork, git, remote):
    commit = publish(fork)
    remote.rename(remote.with_name("renamed.git"))
    git.renamed["remote.git"] = "renamed.git"
    assert fork.serves(f"{git.url}/remote.git", commit)
    assert not fork.serves(f"{git.url}/remote.git", "1" * 40)


def test_a_lost_clone_and_an_expired_token_do_not_prevent_the_reveal(fork, git):
    commit = publish(fork)
    shutil.rmtree(fork.worktree)
    git.authorized = 401
    fork.push(commit)
    fork.verify(commit)


def test_a_redirect_is_not_called_private(fork, git, remote):
    publish(fork)
    git.renamed["remote.git"] = "remote.git"  # it redirects forever
    with pytest.raises(HostRefused) as refusal:
        fork.check_public()
    assert not isinstance(refusal.value, PrivateFork), refusal.value


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_fork_made_private_after_the_commitment_is_to_be_made_public(fork, git, status):
    commit = publish(fork)
    git.anonymous = status
    with pytest.raises(HostRefused, match="Validators cannot read") as refusal:
        fork.serves(fork.url, commit)
    assert "Make the repository public" in refusal.value.remedy


def test_a_lost_checkout_does_not_prevent_the_reveal(fork, git, tmp_path):
    commit = publish(fork)
    run_git(tmp_path, "clone", "-q", fork.url, "mine")
    own = Fork(None, None, tmp_path / "unused", repo_path=tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine")
    assert own.serves(f"{git.url}/remote.git", commit)


def test_a_remote_with_a_name_that_is_not_utf_8(fork, remote):
    commit = publish(fork)
    other = Path(os.fsdecode(os.fsencode(remote.parent) + b"/\xff remote.git"))
    shutil.copytree(remote, other)
    assert fork.serves(other.as_uri(), commit)
