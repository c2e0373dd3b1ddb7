"""Clones of real repositories, both honest and hostile."""

import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from neurons.runtime.errors import Retry
from neurons.validator import clone as module
from neurons.validator.clone import BadFork, Sources, clear, clone, submission_folder
from quasar_kernels.contract import QUASAR_DIR
from tests.neurons.validator.samples import ForkRepository
from tests.processes import HANG, put_program
from tests.repositories import run_git

LOCAL = Sources(files=True)


def clone_fork(fork: ForkRepository, commit: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return clone(fork.url, commit, folder, sources=LOCAL)


def test_any_commit_of_any_branch_can_be_cloned(fork, tmp_path):
    older, tip = fork.commit({"a": "older"}), fork.commit({"a": "tip"})
    fork.git("checkout", "--quiet", "-b", "quasar")
    commits = {"older": older, "tip": tip, "branch": fork.commit({"a": "branch"})}
    fork.git("checkout", "--quiet", "main")
    for name, commit in commits.items():
        tree = clone_fork(fork, commit, tmp_path / name)
        assert (tree / "a").read_text() == name
        assert run_git(tree, "rev-list", "--count", "HEAD") == "1"


def test_missing_repositories_and_commits_are_bad_forks(fork, tmp_path):
    missing = ForkRepository(tmp_path / "nowhere")
    for repository, commit, box in ((fork, "0" * 40, "one"), (missing, "0" * 40, "two")):
        with pytest.raises(BadFork, match="cannot be cloned"):
            clone_fork(repository, commit, tmp_path / box)
    with pytest.raises(BadFork, match="not a full commit hash"):
        clone_fork(fork, "main", tmp_path / "three")


@pytest.mark.parametrize(
    "address",
    [
        *("ext::sh -c touch% /tmp/owned", "ssh://host/fork", "git@host:fork", "http://host/fork"),
        *("https://user:password@host/fork", "--upload-pack=touch owned", "/etc", ""),
    ],
)
def test_unsafe_addresses_are_rejected(address: str) -> None:
    with pytest.raises(BadFork) as caught:
        LOCAL.check(address)
    assert "password" not in str(caught.value)


def test_only_allowed_hosts_and_schemes_pass(fork: ForkRepository) -> None:
    assert LOCAL.check(fork.url).protocol == "file"
    with pytest.raises(BadFork, match="https://"):
        Sources().check(fork.url)
    assert Sources().check("https://github.com/a/b").url == "https://github.com/a/b"
    assert Sources(hosts=()).check("https://host/fork").url == "https://host/fork"
    for address in ("https://github.com.evil.org/a/b", "https://evil.org/github.com/a/b"):
        with pytest.raises(BadFork, match=r"from github\.com only"):
            Sources().check(address)


@pytest.mark.parametrize("address", ["localhost", "[::1]", "10.0.0.1"])
def test_private_addresses_are_rejected(address: str, tmp_path: Path) -> None:
    with pytest.raises(BadFork, match="not a public address"):
        clone(f"https://{address}/a/b", "0" * 40, tmp_path, sources=Sources(hosts=()))
    with pytest.raises(BadFork, match="Nothing is fetched from"):
        clone(f"https://{address}:8000/a", "0" * 40, tmp_path / "..", sources=Sources(hosts=()))


def test_a_commit_with_too_many_files_is_not_checked_out(fork, tmp_path):
    """Ten names per folder, eight levels deep: a kilobyte of git with a billion files."""
    (fork.path / "one").write_text("one")
    hashed = fork.git("hash-object", "-w", "one")
    tree = mktree(fork, [f"100644 blob {hashed}\tf{n}" for n in range(10)])
    for _ in range(8):
        tree = mktree(fork, [f"040000 tree {tree}\td{n}" for n in range(10)])
    fork.git("update-ref", "refs/heads/main", fork.git("commit-tree", "-m", "bomb", tree))
    commit = fork.git("rev-parse", "main")
    with pytest.raises(BadFork, match="too many files"):
        clone_fork(fork, commit, tmp_path / "box")
    assert sum(1 for _ in (tmp_path / "box").rglob("*")) < 100


def test_a_commit_that_keeps_git_busy_is_a_bad_fork(fork, tmp_path, monkeypatch):
    """Folders without files, which git walks for hours without an output."""
    assert module.LIMITS.seconds < min(module.CLONE_SECONDS, module.CHECKOUT_SECONDS)
    monkeypatch.setattr(module, "LIMITS", replace(module.LIMITS, seconds=1))
    monkeypatch.setattr(module, "CHECKOUT_SECONDS", HANG)
    tree = mktree(fork, [])
    for _ in range(10):
        tree = mktree(fork, [f"040000 tree {tree}\td{n}" for n in range(10)])
    fork.git("update-ref", "refs/heads/main", fork.git("commit-tree", "-m", "bomb", tree))
    with pytest.raises(BadFork, match="git cannot list the commit"):
        clone_fork(fork, fork.git("rev-parse", "main"), tmp_path / "box")


def commit_path(fork: ForkRepository, path: str) -> str:
    """Commit an empty file at a path that this machine's file system may not support."""
    blob = fork.git("hash-object", "-w", "/dev/null")
    fork.git("update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
    tree = fork.git("write-tree")
    fork.git("update-ref", "HEAD", fork.git("commit-tree", tree, "-p", "HEAD", "-m", "Change"))
    return fork.git("rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("d/" * 1900 + "f", "a path of more than 512 bytes"),
        ("d/" * 32 + "f", "a path of more than 32 parts"),
        ("a/b/c/d/e/f/g/h/i/j/k", "more than 9 folders"),
    ],
)
def test_deep_paths_are_rejected_before_the_checkout(fork, tmp_path, monkeypatch, path, reason):
    monkeypatch.setattr(module, "TREE_FOLDERS", 9)
    commit = commit_path(fork, path)
    with submission_folder(tmp_path / "work") as folder:
        with pytest.raises(BadFork, match=reason):
            clone(fork.url, commit, folder, sources=LOCAL)
        assert [one.name for one in (folder / "tree").iterdir()] == [".git"]
    assert list((tmp_path / "work").iterdir()) == []


def test_submodules_count_as_folders(fork, tmp_path, monkeypatch):
    """A checkout makes a folder for each, although it clones none of them."""
    monkeypatch.setattr(module, "TREE_FOLDERS", 30)
    known = fork.git("rev-parse", "HEAD")
    for number in range(31):
        fork.git("update-index", "--add", "--cacheinfo", f"160000,{known},modules/{number}")
    tree = fork.git("write-tree")
    fork.git("update-ref", "HEAD", fork.git("commit-tree", tree, "-p", "HEAD", "-m", "Change"))
    with submission_folder(tmp_path / "work") as folder:
        with pytest.raises(BadFork, match="more than 30 folders"):
            clone(fork.url, fork.git("rev-parse", "HEAD"), folder, sources=LOCAL)
        assert [one.name for one in (folder / "tree").iterdir()] == [".git"]


def nest(folder: Path, depth: int) -> None:
    """Make nested folders, deeper than the longest possible path."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


@pytest.mark.parametrize("content", ["deep", "file", "link", "work is a file"])
def test_leftover_clones_are_deleted(content: str, tmp_path: Path) -> None:
    work, kept = tmp_path / "clones", tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    if content == "work is a file":
        work.touch()
    else:
        work.mkdir()
    if content == "deep":
        (work / "submission-x").mkdir()
        nest(work / "submission-x", 3000)
    if content == "file":
        (work / "submission-x").touch()
    if content == "link":
        (work / "submission-x").symlink_to(kept)
    clear(work)
    with submission_folder(work) as folder:
        nest(folder, 2500)
    assert list(work.iterdir()) == []
    assert (kept / "file").exists()


def test_a_commit_with_large_files_is_not_checked_out(fork, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TREE_BYTES", 2**24)
    with (fork.path / "zeros").open("wb") as file:
        file.truncate(2**24 + 1)
    commit = fork.commit({})
    packed = sum(path.stat().st_size for path in (fork.path / ".git").rglob("*") if path.is_file())
    assert packed < 2**18
    with pytest.raises(BadFork, match="files exceed 16 MiB"):
        clone_fork(fork, commit, tmp_path / "box")
    kept = sum(path.stat().st_size for path in (tmp_path / "box").rglob("*") if path.is_file())
    assert kept < 2**18


def mktree(fork: ForkRepository, rows: list[str]) -> str:
    done = subprocess.run(
        ["git", "mktree"], input="\n".join(rows), cwd=fork.path, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_row_29_links_hooks_filters_and_submodules_have_no_effect(fork, tmp_path, monkeypatch):
    secret, marker = tmp_path / "secret", tmp_path / "owned"
    secret.write_text("secret")
    config = tmp_path / "gitconfig"  # a filter in the validator's own settings
    config.write_text(f'[filter "evil"]\n\tsmudge = touch {marker}; cat\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    put_program(tmp_path / "template/hooks/post-checkout", f"touch {marker}")
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(tmp_path / "template"))
    (fork.path / "link").symlink_to(secret)
    modules = f'[submodule "s"]\n\tpath = s\n\turl = {fork.url}\n'
    commit = fork.commit({".gitattributes": "* filter=evil\n", ".gitmodules": modules})
    tree = clone_fork(fork, commit, tmp_path / "box")
    assert (tree / "link").read_text() == str(secret)
    assert not (tree / "link").is_symlink()
    assert not (tree / "s").exists()
    assert not marker.exists()


@pytest.mark.parametrize("attribute", ["working-tree-encoding=UTF-16", "text eol=crlf", "ident"])
def test_attributes_do_not_change_the_bytes_of_a_fork(fork, tmp_path, attribute):
    file = f"{QUASAR_DIR}/gate.py"
    content = "import torch  # $Id$\n"
    fork.commit({file: content})
    (fork.path / ".gitattributes").write_text(f"*.py {attribute}\n")
    fork.git("add", ".gitattributes")  # git would decode the other files
    fork.git("commit", "--quiet", "-m", "Change")
    tree = clone_fork(fork, fork.git("rev-parse", "HEAD"), tmp_path / "box")
    assert (tree / file).read_bytes() == content.encode()


def test_a_stop_ends_a_clone_at_once(fork: ForkRepository, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Retry, match="stopped"):
        clone(fork.url, "0" * 40, tmp_path, sources=LOCAL, stop=stop)
