"""The fork is checked as validators read it: anonymously, over a real git server."""

import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from neurons.miner.publishing.fork import Fork
from neurons.runtime.errors import Held, Retry
from neurons.runtime.git.faults import HostRefused, PrivateFork
from neurons.runtime.git.remote import Token
from tests.neurons.githost import CANARY, GitHub
from tests.neurons.miner.publishing.forks import MakeFork, commit_elsewhere, lay_out, publish
from tests.repositories import run_git

NAME = "me/remote"


@pytest.fixture
def remote(host: GitHub) -> Path:
    host.fork(NAME)
    return host.folder / f"{NAME}.git"


@pytest.fixture
def fork(host: GitHub, make_fork: MakeFork) -> Fork:
    return make_fork(f"{host.url}/{NAME}.git", token=Token(CANARY, urlsplit(host.url).netloc))


def move(host: GitHub, remote: Path) -> None:
    """Rename the repository; requests for its old name are redirected."""
    remote.rename(remote.with_name("renamed.git"))
    host.renamed[NAME] = "me/renamed"


@pytest.mark.parametrize("change", ["", "later commits", "a lost clone"])
def test_an_expired_token_does_not_prevent_the_reveal(fork, host, remote, change):
    commit = publish(fork)
    if change == "later commits":
        commit_elsewhere(remote, "quasar", {"a": "b"})
    elif change:
        shutil.rmtree(fork.worktree)
    host.authorized = 401
    fork.push(commit)
    fork.verify(commit)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_private_fork_is_refused(fork, host, status):
    host.anonymous = status
    commit = lay_out(fork)
    fork.push(commit)
    for check in (lambda: fork.verify(commit), fork.check_public):
        with pytest.raises(PrivateFork, match="Validators cannot read"):
            check()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_fork_that_the_token_cannot_read_either_is_not_called_private(fork, host, status):
    commit = publish(fork)
    host.anonymous = host.authorized = status
    with pytest.raises(HostRefused) as refusal:
        fork.verify(commit)
    assert not isinstance(refusal.value, PrivateFork), refusal.value


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overloaded_host_is_asked_again_later(fork, host, status):
    commit = publish(fork)
    host.anonymous = status
    for check in (lambda: fork.verify(commit), fork.check_public):
        with pytest.raises(Retry):
            check()


def test_a_renamed_account_does_not_prevent_the_reveal_and_gets_no_token(fork, host, remote):
    commit = publish(fork)
    move(host, remote)
    host.seen.clear()
    fork.push(commit)
    fork.verify(commit)
    assert host.credentials == []
    assert fork.serves(f"{host.url}/{NAME}.git", commit)  # the committed address
    assert not fork.serves(f"{host.url}/{NAME}.git", "1" * 40)


@pytest.mark.parametrize("change", ["overwritten", "deleted"])
def test_a_commit_without_a_branch_can_still_be_fetched_by_its_hash(fork, host, remote, change):
    commit = publish(fork)
    if change == "overwritten":
        commit_elsewhere(remote, "quasar", {"a": "b"}, "--force", amend=True)
    else:
        run_git(remote, "update-ref", "-d", "refs/heads/quasar")
    with pytest.raises(Held):
        fork.verify(commit)  # nothing new is committed to it
    host.seen.clear()
    assert fork.serves(fork.url, commit)
    assert host.credentials == []


def test_the_repository_is_public_before_the_commit_is_served(fork):
    commit = lay_out(fork)  # only on this machine
    fork.check_public()
    assert not fork.serves(fork.url, commit)


def test_a_redirect_is_not_called_private(fork, host, remote):
    publish(fork)
    host.renamed[NAME] = NAME  # it redirects forever
    with pytest.raises(HostRefused) as refusal:
        fork.check_public()
    assert not isinstance(refusal.value, PrivateFork), refusal.value


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_fork_made_private_after_the_commitment_is_to_be_made_public(fork, host, status):
    commit = publish(fork)
    host.anonymous = status
    with pytest.raises(HostRefused, match="Validators cannot read") as refusal:
        fork.serves(fork.url, commit)
    assert "Make the repository public" in refusal.value.remedy


def test_a_lost_checkout_does_not_prevent_the_reveal(fork, host, tmp_path):
    commit = publish(fork)
    run_git(tmp_path, "clone", "-q", fork.url, "mine")
    own = Fork(None, None, tmp_path / "unused", repo_path=tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine")
    assert own.serves(f"{host.url}/{NAME}.git", commit)


def test_a_remote_with_a_name_that_is_not_utf_8(fork, remote):
    commit = publish(fork)
    other = Path(os.fsdecode(os.fsencode(remote.parent) + b"/\xff remote.git"))
    shutil.copytree(remote, other)
    assert fork.serves(other.as_uri(), commit)
