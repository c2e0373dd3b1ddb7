"""Clones of real repositories, honest and hostile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from neurons.errors import Retry
from neurons.validation.sandbox import BadFork, checked_remote, clear, clone, sandbox
from tests.neurons.validation.samples import ForkRepository
from tests.repositories import run_git


def take(fork: ForkRepository, commit: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return clone(fork.url, commit, folder, allow_file=True)


def test_a_sandbox_is_empty_and_leaves_nothing(tmp_path: Path) -> None:
    parent = tmp_path / "sandboxes"

    def break_off() -> None:
        with sandbox(parent) as folder:
            assert list(folder.iterdir()) == []
            (folder / "file").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert list(parent.iterdir()) == []
    (parent / "submission-left").mkdir()
    clear(parent)
    assert list(parent.iterdir()) == []


def test_the_tip_is_cloned_alone(fork: ForkRepository, tmp_path: Path) -> None:
    fork.commit({"a": "1"})
    tip = fork.commit({"a": "2"})
    tree = take(fork, tip, tmp_path / "box")
    assert (tree / "a").read_text() == "2"
    assert run_git(tree, "rev-list", "--count", "HEAD") == "1"


def test_an_older_commit_is_fetched_by_its_hash(fork: ForkRepository, tmp_path: Path) -> None:
    older = fork.commit({"a": "1"})
    fork.commit({"a": "2"})
    assert (take(fork, older, tmp_path / "box") / "a").read_text() == "1"


def test_a_commit_of_another_branch_is_fetched(fork: ForkRepository, tmp_path: Path) -> None:
    fork.git("checkout", "--quiet", "-b", "quasar")
    commit = fork.commit({"a": "branch"})
    fork.git("checkout", "--quiet", "main")
    assert (take(fork, commit, tmp_path / "box") / "a").read_text() == "branch"


def test_what_is_not_there_is_the_forks_fault(fork: ForkRepository, tmp_path: Path) -> None:
    missing = ForkRepository(tmp_path / "nowhere")
    for repository, commit, box in ((fork, "0" * 40, "one"), (missing, "0" * 40, "two")):
        with pytest.raises(BadFork, match="cannot be cloned"):
            take(repository, commit, tmp_path / box)
    with pytest.raises(BadFork, match="no full commit hash"):
        take(fork, "main", tmp_path / "three")


@pytest.mark.parametrize(
    "address",
    [
        "ext::sh -c touch% /tmp/owned",
        "ssh://host/fork",
        "git@host:fork",
        "http://host/fork",
        "https://user:password@host/fork",
        "--upload-pack=touch owned",
        "/etc",
        "",
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(BadFork) as caught:
        checked_remote(address, allow_file=True)
    assert "password" not in str(caught.value)


def test_a_file_is_for_an_api_at_home(fork: ForkRepository) -> None:
    assert checked_remote(fork.url, allow_file=True).protocol == "file"
    with pytest.raises(BadFork, match="https://"):
        checked_remote(fork.url, allow_file=False)
    assert checked_remote("https://host/fork", allow_file=False).url == "https://host/fork"


def test_links_hooks_filters_and_submodules_do_nothing(
    fork: ForkRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, marker = tmp_path / "secret", tmp_path / "owned"
    secret.write_text("secret")
    config = tmp_path / "gitconfig"  # a validator's own settings must not lend the fork a filter
    config.write_text(f'[filter "evil"]\n\tsmudge = touch {marker}; cat\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    template = tmp_path / "template" / "hooks"
    template.mkdir(parents=True)
    hook = template / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {marker}\n")
    hook.chmod(0o755)
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(template.parent))
    (fork.path / "link").symlink_to(secret)
    commit = fork.commit(
        {
            ".gitattributes": "* filter=evil\n",
            ".gitmodules": f'[submodule "s"]\n\tpath = s\n\turl = {fork.url}\n',
        }
    )
    tree = take(fork, commit, tmp_path / "box")
    assert (tree / "link").read_text() == str(secret)
    assert not (tree / "link").is_symlink()
    assert not (tree / "s").exists()
    assert not marker.exists()


def test_a_stop_ends_a_clone_at_once(fork: ForkRepository, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    start = time.monotonic()
    with pytest.raises(Retry, match="stopped"):
        clone(fork.url, "0" * 40, tmp_path, allow_file=True, stop=stop)
    assert time.monotonic() - start < 5
