"""The fork on real repositories: crashes, a branch that others move, hostile content."""

import shutil
import signal
from pathlib import Path

import pytest

from neurons.miner.publishing.fork import Fork
from neurons.runtime.errors import ConfigError, Held
from tests.neurons.miner.publishing.forks import (
    MakeFork,
    clone_elsewhere,
    commit_elsewhere,
    lay_out,
    link_elsewhere,
    publish,
)
from tests.processes import put_program, run_python
from tests.repositories import make_repository, run_git

# Crashes


def test_row_27_a_dirty_clone_is_restored(fork: Fork, make_fork: MakeFork) -> None:
    commit = publish(fork)
    (fork.worktree / "README.md").write_text("changed\n")
    (fork.worktree / "torch.py").write_text("raise SystemExit\n")
    (fork.worktree / "fla/__init__.py").unlink()
    run_git(fork.worktree, "add", "-A")
    (fork.worktree / ".git/index.lock").touch()
    (fork.worktree / ".git/refs/heads/quasar.lock").touch()
    assert publish(make_fork()) == commit
    assert (fork.worktree / "README.md").read_text() == "upstream\n"
    assert not (fork.worktree / "torch.py").exists()


def test_a_change_between_prepare_and_commit_is_not_published(fork: Fork) -> None:
    fork.prepare()
    (fork.worktree / "fla/ops/quasar/chunk.py").write_text("# faster, and wrong\n")
    with pytest.raises(Held, match=r"differs from the commit: fla/ops/quasar/chunk\.py"):
        fork.commit()


@pytest.mark.parametrize("step", ["clone", "lay", "commit"])
def test_after_a_kill_while_publishing_it_continues(make_fork, remote, tmp_path, step):
    code = {
        "clone": "Path.rename = die",
        "lay": "os.replace = die",
        "commit": "HardenedGit.update_ref = lambda self, *a: die() if len(a) == 3 else "
        "self._call_process('update_ref', *a)",
    }[step]
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from neurons.miner.publishing.fork import Fork\n"
        "from neurons.runtime.git.command import HardenedGit\n"
        "die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{code}\n"
        "fork = Fork(sys.argv[1], None, Path(sys.argv[2])); fork.prepare(); fork.commit()"
    )
    worktree = tmp_path / "state" / "fork"
    assert run_python("-c", script, remote, worktree).returncode == -signal.SIGKILL
    publish(make_fork())
    assert run_git(remote, "rev-list", "--count", "quasar") == "2"
    assert list(worktree.parent.iterdir()) == [worktree]


def test_a_lock_that_a_killed_git_left_does_not_prevent_the_reveal(fork: Fork) -> None:
    commit = lay_out(fork)
    references = fork.worktree / ".git/refs/remotes/origin"
    references.mkdir(parents=True, exist_ok=True)
    for action in (fork.push, fork.verify):
        (references / "quasar.lock").touch()
        action(commit)


def test_a_broken_clone_is_set_aside_and_the_outer_repository_unchanged(fork, make_fork, tmp_path):
    run_git(tmp_path, "init", "-q")  # the state folder usually lies inside a repository
    run_git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Outer")
    outer = run_git(tmp_path, "rev-parse", "HEAD")
    commit = publish(fork)
    (fork.worktree / ".git/HEAD").unlink()
    assert publish(make_fork()) == commit
    assert (fork.worktree.parent / "fork.previous").is_dir()
    assert run_git(tmp_path, "rev-parse", "HEAD") == outer
    assert run_git(tmp_path, "branch", "--list", "quasar") == ""


def test_another_remote_gets_a_new_clone(make_fork, remote, tmp_path):
    publish(make_fork())
    other = make_repository(tmp_path / "other.git", {"README.md": "unrelated\n"})
    commit = publish(make_fork(str(other)))
    assert run_git(other, "rev-list", "--count", commit) == "2"
    assert (tmp_path / "state/fork.previous").is_dir()


# Others move the fork


def test_row_27_a_branch_that_others_overwrote_is_held_and_not_overwritten(fork, remote):
    commit = publish(fork)
    theirs = commit_elsewhere(remote, "quasar", {"a": "b"}, "--force", amend=True)
    for call in (lambda: fork.verify(commit), lambda: fork.push(commit), fork.prepare):
        with pytest.raises(Held, match="another client moved it") as held:
            call()
        assert "FORK_BRANCH" in held.value.remedy
    assert run_git(remote, "rev-parse", "quasar") == theirs


def test_later_commits_on_the_branch_do_not_prevent_the_reveal(fork, remote):
    commit = publish(fork)
    theirs = commit_elsewhere(remote, "quasar", {"a": "b"})
    fork.push(commit)
    fork.verify(commit)
    assert run_git(remote, "rev-parse", "quasar") == theirs


def test_row_27_a_deleted_branch_is_held_and_can_be_pushed_again(fork, remote):
    commit = publish(fork)
    run_git(remote, "update-ref", "-d", "refs/heads/quasar")
    with pytest.raises(Held, match="is not on"):
        fork.verify(commit)
    fork.push(commit)
    fork.verify(commit)


def test_row_27_a_commit_with_other_content_is_held(fork: Fork, remote: Path) -> None:
    publish(fork)
    name = "fla/ops/quasar/chunk.py"
    theirs = commit_elsewhere(remote, "quasar", {name: "# swapped\n"})
    with pytest.raises(Held, match=f"does not hold the overlay's content: {name}"):
        fork.verify(theirs)


def test_row_28_a_rejected_push_is_held(fork: Fork, remote: Path) -> None:
    hook = put_program(remote / "hooks/pre-receive", "echo 'branch is protected'\nexit 1")
    commit = lay_out(fork)
    with pytest.raises(Held, match="rejected the push") as held:
        fork.push(commit)
    assert "FORK_BRANCH" in held.value.remedy
    with pytest.raises(Held, match="is not on"):
        fork.verify(commit)
    hook.unlink()
    fork.push(commit)


def test_row_27_a_push_that_lost_a_race_is_held(fork, remote, monkeypatch):
    first = publish(fork)
    theirs = commit_elsewhere(remote, "quasar", {"a": "b"})
    later = run_git(fork.worktree, "commit-tree", f"{first}^{{tree}}", "-p", first, "-m", "later")
    *reader, heads, default = fork._read()
    before = (*reader, {**heads, "quasar": first}, default)  # the race
    monkeypatch.setattr(Fork, "_read", lambda self: before)
    with pytest.raises(Held, match="branch at the same time"):
        fork.push(later)
    assert run_git(remote, "rev-parse", "quasar") == theirs


# Hostile content


def test_row_29_a_link_to_a_folder_is_refused(fork: Fork, remote: Path) -> None:
    outside = remote.parent / "outside"
    outside.mkdir()
    link_elsewhere(remote, "fla/ops", outside)
    with pytest.raises(Held, match="has to be a folder"):
        fork.prepare()
    assert list(outside.iterdir()) == []


def test_a_link_to_a_file_is_replaced(fork: Fork, remote: Path) -> None:
    outside = remote.parent / "outside.py"
    outside.write_text("untouched\n")
    link_elsewhere(remote, "fla/ops/quasar/chunk.py", outside)
    commit = publish(fork)
    assert outside.read_text() == "untouched\n"
    assert run_git(remote, "ls-tree", commit, "fla/ops/quasar/chunk.py").startswith("100644 blob")


def test_row_29_submodules_are_not_fetched(fork: Fork, remote: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    clone = clone_elsewhere(remote, "main")
    (clone / ".gitmodules").write_text(
        f'[submodule "x"]\n\tpath = x\n\turl = ext::sh -c "touch% {trap}"\n'
        f"\tupdate = !touch {trap}\n"
    )
    head = run_git(clone, "rev-parse", "HEAD")
    run_git(clone, "update-index", "--add", "--cacheinfo", f"160000,{head},x")
    run_git(clone, "add", ".gitmodules")
    run_git(clone, "commit", "-qm", "Submodule")
    run_git(clone, "push", "-q", "origin", "HEAD:quasar")
    publish(fork)
    assert not trap.exists()


@pytest.mark.parametrize(
    "url",
    [
        "ext::sh -c 'touch /tmp/trap'",
        "http://github.example/me/fork",
        "https://me:secret-word@github.com/me/fork",
        "git://github.com/me/fork",
        "https://github.com/me/fork?x=1",
    ],
)
def test_row_29_addresses_that_run_programs_or_leak_are_refused(make_fork, url):
    with pytest.raises(ConfigError, match="FORK_REMOTE") as error:
        make_fork(url)
    assert "secret-word" not in str(error.value)


@pytest.mark.parametrize("branch", ["-f", "a..b", "a b", "x/"])
def test_invalid_branch_names_are_refused(make_fork: MakeFork, branch: str) -> None:
    with pytest.raises(ConfigError, match="FORK_BRANCH"):
        make_fork(branch=branch)


def test_the_callers_git_settings_and_variables_have_no_effect(fork, tmp_path, monkeypatch):
    trap = tmp_path / "trap"
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.gitconfig").write_text(
        f"[core]\n\tfsmonitor = touch {trap}\n[commit]\n\tgpgSign = true\n[user]\n\tname = Me\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_TRACE", str(trap))
    publish(fork)
    assert not trap.exists()
    assert not (tmp_path / "nowhere").exists()


def test_a_state_folder_that_cannot_be_used_is_held(fork: Fork, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder has to be")
    with pytest.raises(Held, match="cannot be used"):
        fork.prepare()


# A power cut


@pytest.mark.parametrize(
    ("name", "keep"), [("refs/heads/quasar", 0), ("tree", 0), ("index", 10), ("pack", 10)]
)
def test_a_clone_that_a_power_cut_damaged_is_cloned_again(fork, make_fork, name, keep):
    """A file of the repository is emptied or truncated; every step still succeeds."""
    commit = publish(fork)
    git = fork.worktree / ".git"
    damaged = git / name
    if name == "tree":
        digest = run_git(fork.worktree, "rev-parse", f"{commit}^{{tree}}")
        damaged = git / "objects" / digest[:2] / digest[2:]
    elif name == "pack":
        run_git(fork.worktree, "repack", "-adq")
        damaged = next(git.glob("objects/pack/*.pack"))
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:keep])
    again = make_fork()
    again.verify(commit)
    again.push(commit)
    again.prepare()
    assert again.commit() == commit
    run_git(again.worktree, "fsck", "--full", "--no-dangling")


def test_a_damaged_checkout_at_repo_path_is_never_replaced(fork: Fork, tmp_path: Path) -> None:
    publish(fork)
    shutil.move(fork.worktree, tmp_path / "mine")
    run_git(tmp_path / "mine", "checkout", "-q", "quasar")
    (tmp_path / "mine/.git/index").write_bytes(b"")
    owned = Fork(None, None, tmp_path / "state/fork", repo_path=tmp_path / "mine")
    with pytest.raises(Held, match="index"):
        owned.prepare()
    assert (tmp_path / "mine/.git/index").read_bytes() == b""
