"""The fork on real repositories: what a validator clones, what a crash leaves, who moved it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from githost import make_repository, run_git

from neurons.errors import ConfigError, Held
from neurons.mining import fork as fork_module
from neurons.mining import overlay as overlay_module
from neurons.mining.context import overlay_digest
from neurons.mining.fork import Fork, open_fork
from neurons.settings import load_settings
from quasar_kernels.contract import OVERLAY, check_tree, overlay_files

MakeFork = Callable[..., Fork]

UPSTREAM_FILES = {
    "README.md": "upstream\n",
    "fla/__init__.py": "",
    "fla/ops/quasar/chunk.py": "# the upstream's own kernel\n",
    "fla/ops/quasar/theirs.py": "# a file of the upstream's, which stays\n",
}


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("upstream") / "upstream.git", UPSTREAM_FILES)


@pytest.fixture
def remote(tmp_path: Path, upstream: Path) -> Path:
    run_git(tmp_path, "clone", "-q", "--bare", str(upstream), "remote.git")
    return tmp_path / "remote.git"


@pytest.fixture
def make_fork(tmp_path: Path, remote: Path) -> MakeFork:
    def make(remote_url: str = str(remote), **options: object) -> Fork:
        return Fork(remote_url, None, tmp_path / "state" / "fork", **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the overlay that a test may change."""
    copy = tmp_path / "overlay"
    shutil.copytree(OVERLAY, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(overlay_module, "OVERLAY", copy)
    monkeypatch.setattr(
        fork_module,
        "overlay_files",
        lambda scope: sorted(
            PurePosixPath(p.relative_to(copy).as_posix()) for p in copy.rglob("*") if p.is_file()
        ),
    )
    return copy


def publish(fork: Fork) -> str:
    fork.prepare()
    commit = fork.commit()
    fork.push(commit)
    fork.verify(commit)
    return commit


def commit_elsewhere(
    remote: Path, branch: str, files: dict[str, str], *options: str, amend: bool = False
) -> str:
    """Commit and push as somebody else would; return the hash."""
    clone = remote.parent / f"elsewhere-{len(list(remote.parent.iterdir()))}"
    run_git(remote.parent, "clone", "-q", "-b", branch, str(remote), str(clone))
    for name, text in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    run_git(clone, "add", "-A")
    run_git(clone, "commit", "-qm", "Something else", *(["--amend"] if amend else []))
    run_git(clone, "push", "-q", *options, "origin", f"HEAD:{branch}")
    return run_git(clone, "rev-parse", "HEAD")


def test_a_validator_gets_the_overlay_byte_for_byte(
    make_fork: MakeFork, remote: Path, tmp_path: Path
) -> None:
    fork = make_fork()
    commit = publish(fork)
    assert fork.url == f"file://{remote}"
    # The validator's own commands.
    run_git(tmp_path, "clone", "-q", "--depth", "1", fork.url, "validator")
    clone = tmp_path / "validator"
    run_git(clone, "fetch", "-q", "--depth", "1", "origin", commit)
    run_git(clone, "checkout", "-q", commit)
    for name in overlay_files():
        assert (clone / name).read_bytes() == (OVERLAY / name).read_bytes()
    assert (clone / "fla/ops/quasar/theirs.py").exists()
    assert (clone / "README.md").read_text() == "upstream\n"
    assert check_tree(clone) == []
    # What is measured is what was committed.
    assert run_git(fork.worktree, "rev-parse", "HEAD") == commit
    assert run_git(fork.worktree, "status", "--porcelain") == ""


def test_the_commit_names_its_author_and_its_parent(
    make_fork: MakeFork, remote: Path, upstream: Path
) -> None:
    commit = publish(make_fork(author="Ada <ada@example.org>"))
    facts = run_git(remote, "log", "-1", "--format=%an <%ae>|%cn|%P|%G?", commit).split("|")
    assert facts[:2] == ["Ada <ada@example.org>", "Ada"]
    assert facts[2] == run_git(upstream, "rev-parse", "main")
    assert facts[3] == "N"
    assert run_git(remote, "rev-parse", "main") == run_git(upstream, "rev-parse", "main")


def test_the_same_content_is_the_same_commit(make_fork: MakeFork, remote: Path) -> None:
    fork = make_fork()
    commit = publish(fork)
    assert publish(fork) == commit
    assert publish(make_fork()) == commit
    assert run_git(remote, "rev-list", "--count", "quasar") == "2"


def test_a_lost_clone_gives_the_same_hash_again(make_fork: MakeFork) -> None:
    fork = make_fork()
    fork.prepare()
    commit = fork.commit()  # not pushed: the kernel is private until the reveal
    shutil.rmtree(fork.worktree)
    fork.prepare()
    assert fork.commit() == commit


def test_a_clone_lost_before_the_reveal_is_made_again(make_fork: MakeFork, remote: Path) -> None:
    fork = make_fork()
    fork.prepare()
    commit = fork.commit()
    shutil.rmtree(fork.worktree)
    again = make_fork()
    again.push(commit)
    shutil.rmtree(fork.worktree)
    again.verify(commit)
    assert run_git(remote, "rev-parse", "quasar") == commit


def test_a_lost_clone_of_other_kernels_pushes_nothing(
    make_fork: MakeFork, remote: Path, overlay: Path
) -> None:
    fork = make_fork()
    fork.prepare()
    commit = fork.commit()
    shutil.rmtree(fork.worktree)
    (overlay / "fla/ops/quasar/README.md").write_text("changed\n")
    with pytest.raises(Held, match=f"The commit {commit} is not in"):
        make_fork().push(commit)
    assert run_git(remote, "branch", "--list", "quasar") == ""


def test_attributes_of_the_fork_change_no_byte(make_fork: MakeFork, remote: Path) -> None:
    # A validator's clone obeys these; the miner's must not.
    commit_elsewhere(remote, "main", {".gitattributes": "*.py text eol=crlf ident filter=evil\n"})
    fork = make_fork()
    commit = publish(fork)
    theirs = "fla/ops/quasar/theirs.py"
    assert (fork.worktree / theirs).read_bytes() == UPSTREAM_FILES[theirs].encode()
    for name in overlay_files():
        content = (OVERLAY / name).read_bytes()
        assert (fork.worktree / name).read_bytes() == content
        blob = subprocess.run(
            ["git", "cat-file", "blob", f"{commit}:{name}"],
            cwd=remote,
            capture_output=True,
            check=True,
        )
        assert blob.stdout == content


def test_a_new_overlay_is_a_new_commit_on_top(
    make_fork: MakeFork, overlay: Path, remote: Path
) -> None:
    old_file = overlay / "fla/ops/quasar/old.py"
    old_file.write_text("# to be dropped\n")
    first = publish(make_fork())
    old_file.unlink()
    (overlay / "fla/ops/quasar/new.py").write_text("# added\n")
    fork = make_fork()
    second = publish(fork)
    assert run_git(remote, "rev-parse", f"{second}^") == first
    changes = run_git(remote, "diff", "--name-status", first, second).split()
    assert changes == ["A", "fla/ops/quasar/new.py", "D", "fla/ops/quasar/old.py"]
    assert not (fork.worktree / "fla/ops/quasar/old.py").exists()
    assert (fork.worktree / "fla/ops/quasar/theirs.py").exists()


def test_a_commit_of_the_earlier_overlay_still_verifies(make_fork: MakeFork, overlay: Path) -> None:
    fork = make_fork()
    commit = publish(fork)
    (overlay / "fla/ops/quasar/chunk.py").write_text("# the next version\n")
    make_fork().verify(commit)


# What is published

LAYER = "fla/layers/quasar.py"
PUBLIC_LAYER = "# the upstream's layer, with no newline at its end\r\n\n# \xe9"


def test_with_ops_the_operator_alone_is_published(
    make_fork: MakeFork, remote: Path, tmp_path: Path
) -> None:
    base = commit_elsewhere(remote, "main", {LAYER: PUBLIC_LAYER})
    settings = {"fork_remote": str(remote), "state_dir": tmp_path / "state", "fork_scope": "ops"}
    fork = open_fork(load_settings(settings, Path(os.devnull), {}))
    commit = publish(fork)
    changed = run_git(remote, "diff", "--name-only", base, commit).split()
    assert changed
    assert all(name.startswith("fla/ops/quasar/") for name in changed)
    run_git(tmp_path, "clone", "-q", "-b", "quasar", fork.url, "validator")
    for tree in (tmp_path / "validator", fork.worktree):
        assert (tree / LAYER).read_bytes() == PUBLIC_LAYER.encode()
        assert (tree / "fla/ops/quasar/chunk.py").read_bytes() == (
            OVERLAY / "fla/ops/quasar/chunk.py"
        ).read_bytes()
        assert check_tree(tree) == []


def test_the_scope_is_part_of_the_content_s_name() -> None:
    assert overlay_digest() == overlay_digest("layer") != overlay_digest("ops")


def test_a_fork_without_a_layer_is_held_with_ops(make_fork: MakeFork) -> None:
    with pytest.raises(Held, match="FORK_SCOPE=layer"):
        make_fork(scope="ops").prepare()


@pytest.mark.parametrize("text", [PUBLIC_LAYER, "no newline", "two newlines\n\n", ""])
def test_the_scope_may_change_and_change_back(make_fork: MakeFork, remote: Path, text: str) -> None:
    base = commit_elsewhere(remote, "main", {LAYER: text})
    whole = publish(make_fork())
    alone = publish(make_fork(scope="ops"))
    again = publish(make_fork())
    assert run_git(remote, "log", "--format=%H", "quasar").split()[:4] == [
        again,
        alone,
        whole,
        base,
    ]
    blob = f"{alone}:{LAYER}"
    assert run_git(remote, "rev-parse", blob) == run_git(remote, "rev-parse", f"{base}:{LAYER}")
    for commit in (whole, again):
        held = run_git(remote, "show", f"{commit}:{LAYER}")
        assert held == (OVERLAY / LAYER).read_text().strip()


def test_a_layer_that_was_only_ours_goes_with_ops(make_fork: MakeFork, remote: Path) -> None:
    publish(make_fork())
    with pytest.raises(Held, match="layer is missing"):
        make_fork(scope="ops").prepare()


def test_a_layer_changed_by_others_since_stays_with_ops(make_fork: MakeFork, remote: Path) -> None:
    publish(make_fork())
    commit_elsewhere(remote, "quasar", {LAYER: "# mended by hand\n"})
    fork = make_fork(scope="ops")
    publish(fork)
    assert (fork.worktree / LAYER).read_text() == "# mended by hand\n"


def test_a_fork_that_breaks_the_contract_is_held(make_fork: MakeFork, overlay: Path) -> None:
    with (overlay / "fla/ops/quasar/gate.py").open("a") as file:
        file.write("# from fla.ops.gla\n")
    (overlay / "fla/ops/quasar/fused_recurrent.py").unlink()
    with pytest.raises(Held) as held:
        make_fork().prepare()
    assert "2 rule(s)" in held.value.reason
    assert "fla/ops/quasar/gate.py" in held.value.reason
    assert "fla/ops/quasar/fused_recurrent.py" in held.value.reason


def test_the_branch_goes_on_from_the_remote_s(
    make_fork: MakeFork, remote: Path, tmp_path: Path
) -> None:
    first = publish(make_fork())
    theirs = commit_elsewhere(remote, "quasar", {"notes.txt": "kept\n"})
    fork = Fork(str(remote), None, tmp_path / "another-machine" / "fork")
    assert publish(fork) == theirs != first
    assert publish(make_fork()) == theirs
    assert (fork.worktree / "notes.txt").read_text() == "kept\n"


def test_an_empty_remote_starts_from_the_upstream(
    make_fork: MakeFork, upstream: Path, tmp_path: Path
) -> None:
    run_git(tmp_path, "init", "-q", "--bare", "empty.git")
    fork = Fork(str(tmp_path / "empty.git"), str(upstream), tmp_path / "state" / "fork")
    commit = publish(fork)
    parent = run_git(tmp_path / "empty.git", "rev-parse", f"{commit}^")
    assert parent == run_git(upstream, "rev-parse", "main")
    without = Fork(str(tmp_path / "empty.git"), None, tmp_path / "other", "another")
    assert publish(without)  # the branch that is there now is the start
    run_git(tmp_path, "init", "-q", "--bare", "void.git")
    with pytest.raises(Held, match="is empty"):
        make_fork(str(tmp_path / "void.git")).prepare()


def test_a_remote_that_is_not_there_is_made_of_the_upstream(upstream: Path, tmp_path: Path) -> None:
    fork = Fork(str(tmp_path / "new.git"), str(upstream), tmp_path / "fork")
    publish(fork)
    assert run_git(tmp_path / "new.git", "branch", "--format=%(refname:short)").split() == [
        "main",
        "quasar",
    ]


# Crashes


def test_a_dirty_clone_is_put_back(make_fork: MakeFork) -> None:
    fork = make_fork()
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


def test_a_change_between_prepare_and_commit_is_not_published(make_fork: MakeFork) -> None:
    fork = make_fork()
    fork.prepare()
    (fork.worktree / "fla/ops/quasar/chunk.py").write_text("# faster, and wrong\n")
    with pytest.raises(Held, match=r"differs from the commit: fla/ops/quasar/chunk\.py"):
        fork.commit()


def test_killed_between_clone_and_rename_it_starts_over(
    make_fork: MakeFork, remote: Path, tmp_path: Path
) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from neurons.mining.fork import Fork\n"
        "Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Fork(sys.argv[1], None, Path(sys.argv[2])).prepare()"
    )
    worktree = tmp_path / "state" / "fork"
    killed = subprocess.run([sys.executable, "-c", code, remote, worktree], cwd=os.getcwd())
    assert killed.returncode == -signal.SIGKILL
    assert not worktree.exists()
    assert list(worktree.parent.glob(".fork.partial-*"))
    publish(make_fork())
    assert list(worktree.parent.iterdir()) == [worktree]


@pytest.mark.parametrize("step", ["lay", "commit"])
def test_killed_while_laying_or_committing_it_goes_on(
    make_fork: MakeFork, remote: Path, tmp_path: Path, step: str
) -> None:
    code = {
        "lay": "os.replace = die",
        "commit": "HardenedGit.update_ref = lambda self, *a: die() if len(a) == 3 else "
        "self._call_process('update_ref', *a)",
    }[step]
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from neurons.mining.fork import Fork; from neurons.mining.gitcmd import HardenedGit\n"
        "die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{code}\n"
        "fork = Fork(sys.argv[1], None, Path(sys.argv[2])); fork.prepare(); fork.commit()"
    )
    worktree = tmp_path / "state" / "fork"
    killed = subprocess.run([sys.executable, "-c", script, remote, worktree], cwd=os.getcwd())
    assert killed.returncode == -signal.SIGKILL
    publish(make_fork())
    assert run_git(remote, "rev-list", "--count", "quasar") == "2"


def test_a_broken_clone_is_set_aside_and_git_does_not_climb(
    make_fork: MakeFork, tmp_path: Path
) -> None:
    run_git(tmp_path, "init", "-q")  # the state folder usually lies inside a repository
    run_git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Outer")
    outer = run_git(tmp_path, "rev-parse", "HEAD")
    fork = make_fork()
    commit = publish(fork)
    (fork.worktree / ".git/HEAD").unlink()
    assert publish(make_fork()) == commit
    assert (fork.worktree.parent / "fork.previous").is_dir()
    assert run_git(tmp_path, "rev-parse", "HEAD") == outer
    assert run_git(tmp_path, "branch", "--list", "quasar") == ""


def test_another_remote_gets_a_clone_of_its_own(
    make_fork: MakeFork, remote: Path, tmp_path: Path
) -> None:
    publish(make_fork())
    other = make_repository(tmp_path / "other.git", {"README.md": "unrelated\n"})
    commit = publish(make_fork(str(other)))
    assert run_git(other, "rev-list", "--count", commit) == "2"
    assert (tmp_path / "state/fork.previous").is_dir()


# Others move the fork


def test_a_force_pushed_branch_is_held_and_not_overwritten(
    make_fork: MakeFork, remote: Path
) -> None:
    fork = make_fork()
    commit = publish(fork)
    theirs = commit_elsewhere(remote, "quasar", {"a": "b"}, "--force", amend=True)
    for act in (lambda: fork.verify(commit), lambda: fork.push(commit), fork.prepare):
        with pytest.raises(Held, match="someone else moved it") as held:
            act()
        assert "FORK_BRANCH" in held.value.remedy
    assert run_git(remote, "rev-parse", "quasar") == theirs


def test_a_commit_on_top_of_ours_is_held_at_the_reveal(make_fork: MakeFork, remote: Path) -> None:
    fork = make_fork()
    commit = publish(fork)
    theirs = commit_elsewhere(remote, "quasar", {"a": "b"})
    with pytest.raises(Held, match="moved"):
        fork.verify(commit)
    with pytest.raises(Held, match="moved"):
        fork.push(commit)
    assert run_git(remote, "rev-parse", "quasar") == theirs


def test_a_branch_that_went_is_held_and_can_be_pushed_again(
    make_fork: MakeFork, remote: Path
) -> None:
    fork = make_fork()
    commit = publish(fork)
    run_git(remote, "update-ref", "-d", "refs/heads/quasar")
    with pytest.raises(Held, match="is not on"):
        fork.verify(commit)
    fork.push(commit)
    fork.verify(commit)


def test_a_commit_that_was_not_pushed_does_not_verify(make_fork: MakeFork) -> None:
    fork = make_fork()
    fork.prepare()
    commit = fork.commit()
    with pytest.raises(Held, match="is not on"):
        fork.verify(commit)


def test_a_commit_with_other_content_is_held(make_fork: MakeFork, remote: Path) -> None:
    fork = make_fork()
    publish(fork)
    name = "fla/ops/quasar/chunk.py"
    theirs = commit_elsewhere(remote, "quasar", {name: "# swapped\n"})
    with pytest.raises(Held, match=f"does not hold the overlay's content: {name}"):
        fork.verify(theirs)


def test_an_unknown_commit_is_not_pushed(make_fork: MakeFork, remote: Path) -> None:
    fork = make_fork()
    publish(fork)
    with pytest.raises(Held, match="is not in"):
        fork.push("0123456789" * 4)


def test_a_rejected_push_is_held(make_fork: MakeFork, remote: Path) -> None:
    hook = remote / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho 'branch is protected'\nexit 1\n")
    hook.chmod(0o755)
    fork = make_fork()
    fork.prepare()
    commit = fork.commit()
    with pytest.raises(Held, match="rejected the push") as held:
        fork.push(commit)
    assert "FORK_BRANCH" in held.value.remedy
    hook.unlink()
    fork.push(commit)


def test_a_push_that_lost_a_race_is_held(
    make_fork: MakeFork, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = make_fork()
    first = publish(fork)
    theirs = commit_elsewhere(remote, "quasar", {"a": "b"})
    later = run_git(fork.worktree, "commit-tree", f"{first}^{{tree}}", "-p", first, "-m", "later")
    monkeypatch.setattr(Fork, "_remote_tip", lambda self: first)  # what was read before the race
    with pytest.raises(Held, match="moved while it was being pushed"):
        fork.push(later)
    assert run_git(remote, "rev-parse", "quasar") == theirs


# Hostile content


@pytest.mark.parametrize("place", ["fla/ops/quasar", "fla/ops"])
def test_a_link_in_the_fork_leads_nowhere(make_fork: MakeFork, remote: Path, place: str) -> None:
    outside = remote.parent / "outside"
    outside.mkdir()
    clone = remote.parent / "attacker"
    run_git(remote.parent, "clone", "-q", str(remote), str(clone))
    shutil.rmtree(clone / place)
    (clone / place).symlink_to(outside)
    run_git(clone, "add", "-A")
    run_git(clone, "commit", "-qm", "Link")
    run_git(clone, "push", "-q", "origin", "HEAD:quasar")
    with pytest.raises(Held, match="has to be a folder"):
        make_fork().prepare()
    assert list(outside.iterdir()) == []


def test_a_linked_file_is_replaced_not_followed(make_fork: MakeFork, remote: Path) -> None:
    outside = remote.parent / "outside.py"
    outside.write_text("untouched\n")
    clone = remote.parent / "attacker"
    run_git(remote.parent, "clone", "-q", str(remote), str(clone))
    (clone / "fla/ops/quasar/chunk.py").unlink()
    (clone / "fla/ops/quasar/chunk.py").symlink_to(outside)
    run_git(clone, "add", "-A")
    run_git(clone, "commit", "-qm", "Link")
    run_git(clone, "push", "-q", "origin", "HEAD:quasar")
    fork = make_fork()
    commit = publish(fork)
    assert outside.read_text() == "untouched\n"
    assert run_git(remote, "ls-tree", commit, "fla/ops/quasar/chunk.py").startswith("100644 blob")


def test_submodules_are_not_fetched(make_fork: MakeFork, remote: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    clone = remote.parent / "attacker"
    run_git(remote.parent, "clone", "-q", str(remote), str(clone))
    (clone / ".gitmodules").write_text(
        f'[submodule "x"]\n\tpath = x\n\turl = ext::sh -c "touch% {trap}"\n'
        f"\tupdate = !touch {trap}\n"
    )
    head = run_git(clone, "rev-parse", "HEAD")
    run_git(clone, "update-index", "--add", "--cacheinfo", f"160000,{head},x")
    run_git(clone, "add", ".gitmodules")
    run_git(clone, "commit", "-qm", "Submodule")
    run_git(clone, "push", "-q", "origin", "HEAD:quasar")
    publish(make_fork())
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
def test_addresses_that_run_programs_or_leak_are_refused(make_fork: MakeFork, url: str) -> None:
    with pytest.raises(ConfigError, match="FORK_REMOTE") as error:
        make_fork(url)
    assert "secret-word" not in str(error.value)


@pytest.mark.parametrize("branch", ["-f", "a..b", "", "a b", "x/", "+main", "a:b"])
def test_names_that_are_no_branch_are_refused(make_fork: MakeFork, branch: str) -> None:
    with pytest.raises(ConfigError, match="FORK_BRANCH"):
        make_fork(branch=branch)


def test_the_caller_s_git_environment_does_not_matter(
    make_fork: MakeFork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.gitconfig").write_text(
        f"[core]\n\tfsmonitor = touch {trap}\n[commit]\n\tgpgSign = true\n[user]\n\tname = Me\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_TRACE", str(trap))
    publish(make_fork())
    assert not trap.exists()
    assert not (tmp_path / "nowhere").exists()


def test_a_state_folder_that_cannot_be_used_is_held(make_fork: MakeFork, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder has to be")
    with pytest.raises(Held, match="cannot be used"):
        make_fork().prepare()
