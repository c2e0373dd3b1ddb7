"""The fork on real repositories: the published content, and the clone of a validator."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from neurons.miner.publishing.fork import Fork
from neurons.miner.publishing.github import open_fork
from neurons.runtime.errors import Held
from neurons.runtime.git.command import AUTHOR
from neurons.runtime.loading import Sources
from quasar_kernels.contract import OVERLAY, check_tree, overlay_files
from tests.neurons.githost import UPSTREAM_FILES
from tests.neurons.miner.publishing.forks import MakeFork, commit_elsewhere, lay_out, publish
from tests.repositories import run_git


def test_a_validator_gets_the_overlay_byte_for_byte(remote, upstream, tmp_path):
    fork = Fork(str(remote), None, tmp_path / "state" / "fork")
    commit = publish(fork)
    assert fork.url == f"file://{remote}"
    # the validator's commands
    run_git(tmp_path, "clone", "-q", "--depth", "1", fork.url, "validator")
    clone = tmp_path / "validator"
    run_git(clone, "fetch", "-q", "--depth", "1", "origin", commit)
    run_git(clone, "checkout", "-q", commit)
    for name in overlay_files():
        assert (clone / name).read_bytes() == (OVERLAY / name).read_bytes()
    assert (clone / "fla/ops/quasar/theirs.py").exists()
    assert ((clone / "README.md").read_text(), check_tree(clone)) == ("upstream\n", [])
    # the measured worktree is the commit
    assert run_git(fork.worktree, "rev-parse", "HEAD") == commit
    assert run_git(fork.worktree, "status", "--porcelain") == ""
    parent = run_git(upstream, "rev-parse", "main")
    facts = run_git(remote, "log", "-1", "--format=%an <%ae>|%cn|%P|%G?", commit)
    assert facts == f"{AUTHOR}|quasar-miner|{parent}|N"
    assert run_git(remote, "rev-parse", "main") == parent


def test_the_same_content_has_the_same_commit(fork, make_fork, remote, overlay):
    commit = publish(fork)
    assert (publish(fork), publish(make_fork())) == (commit, commit)
    assert run_git(remote, "rev-list", "--count", "quasar") == "2"
    (overlay / "fla/ops/quasar/chunk.py").write_text("# the next version\n")
    make_fork().verify(commit)  # a commit of the earlier overlay


def test_a_clone_lost_before_the_reveal_is_created_again(fork, make_fork, remote):
    commit = lay_out(fork)  # not pushed, as with PUBLISH_AT=before_reveal
    shutil.rmtree(fork.worktree)
    assert lay_out(fork) == commit
    shutil.rmtree(fork.worktree)
    again = make_fork()
    again.push(commit)
    shutil.rmtree(fork.worktree)
    again.verify(commit)
    assert run_git(remote, "rev-parse", "quasar") == commit


def test_a_lost_clone_and_changed_kernels_push_nothing(fork, make_fork, remote, overlay):
    commit = lay_out(fork)
    shutil.rmtree(fork.worktree)
    (overlay / "fla/ops/quasar/gate.py").write_text("# changed\n")
    with pytest.raises(Held, match=f"The commit {commit} is not in"):
        make_fork().push(commit)
    assert run_git(remote, "branch", "--list", "quasar") == ""


def test_git_attributes_change_no_byte(fork: Fork, remote: Path, overlay: Path) -> None:
    # a validator's clone applies these; the miner's must not
    commit_elsewhere(remote, "main", {".gitattributes": "*.py text eol=crlf ident filter=evil\n"})
    commit = publish(fork)
    theirs = "fla/ops/quasar/theirs.py"
    assert (fork.worktree / theirs).read_bytes() == UPSTREAM_FILES[theirs].encode()
    for name in overlay_files(root=overlay):
        content = (overlay / name).read_bytes()
        assert (fork.worktree / name).read_bytes() == content
        blob = ["git", "cat-file", "blob", f"{commit}:{name}"]
        assert subprocess.run(blob, cwd=remote, capture_output=True).stdout == content


def test_a_new_overlay_is_a_new_commit_on_top(make_fork, overlay, remote):
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


# What is published

LAYER = "fla/layers/quasar.py"
PUBLIC_LAYER = "# the upstream's layer, with no newline at its end\r\n\n# \xe9"


def test_scope_ops_publishes_only_the_operator(remote, tmp_path):
    base = commit_elsewhere(remote, "main", {LAYER: PUBLIC_LAYER})
    settings = {"fork_remote": str(remote), "state_dir": tmp_path / "state", "fork_scope": "ops"}
    fork = open_fork(Sources(settings, Path(os.devnull), {}).settings())
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


def test_scope_ops_requires_a_fork_with_a_layer(make_fork: MakeFork) -> None:
    with pytest.raises(Held, match="FORK_SCOPE=layer"):
        make_fork(scope="ops").prepare()


@pytest.mark.parametrize("text", [PUBLIC_LAYER, "# two newlines\n\n"])
def test_a_change_of_scope_restores_the_layer(make_fork: MakeFork, remote: Path, text: str) -> None:
    base = commit_elsewhere(remote, "main", {LAYER: text})
    whole = publish(make_fork())
    alone = publish(make_fork(scope="ops"))
    again = publish(make_fork())
    commits = run_git(remote, "log", "--format=%H", "quasar").split()
    assert commits[:4] == [again, alone, whole, base]
    blob = f"{alone}:{LAYER}"
    assert run_git(remote, "rev-parse", blob) == run_git(remote, "rev-parse", f"{base}:{LAYER}")
    for commit in (whole, again):
        held = run_git(remote, "show", f"{commit}:{LAYER}")
        assert held == (OVERLAY / LAYER).read_text().strip()


def test_scope_ops_keeps_a_layer_that_others_changed(make_fork: MakeFork, remote: Path) -> None:
    publish(make_fork())
    commit_elsewhere(remote, "quasar", {LAYER: "# corrected by hand\n"})
    fork = make_fork(scope="ops")
    publish(fork)
    assert (fork.worktree / LAYER).read_text() == "# corrected by hand\n"


def test_a_fork_that_breaks_the_contract_is_held(make_fork: MakeFork, overlay: Path) -> None:
    with (overlay / "fla/ops/quasar/gate.py").open("a") as file:
        file.write("# from fla.ops.gla\n")
    (overlay / "fla/ops/quasar/fused_recurrent.py").unlink()
    with pytest.raises(Held) as held:
        make_fork().prepare()
    assert "2 rules" in held.value.reason
    assert "fla/ops/quasar/gate.py" in held.value.reason
    assert "fla/ops/quasar/fused_recurrent.py" in held.value.reason


def test_the_branch_continues_from_the_remotes_tip(make_fork, remote, tmp_path):
    first = publish(make_fork())
    theirs = commit_elsewhere(remote, "quasar", {"notes.txt": "kept\n"})
    fork = Fork(str(remote), None, tmp_path / "another-machine" / "fork")
    assert publish(fork) == theirs != first
    assert publish(make_fork()) == theirs
    assert (fork.worktree / "notes.txt").read_text() == "kept\n"


def test_an_empty_remote_starts_from_the_upstream(make_fork, upstream, tmp_path):
    run_git(tmp_path, "init", "-q", "--bare", "empty.git")
    fork = Fork(str(tmp_path / "empty.git"), str(upstream), tmp_path / "state" / "fork")
    commit = publish(fork)
    parent = run_git(tmp_path / "empty.git", "rev-parse", f"{commit}^")
    assert parent == run_git(upstream, "rev-parse", "main")
    run_git(tmp_path, "init", "-q", "--bare", "void.git")
    with pytest.raises(Held, match="is empty"):
        make_fork(str(tmp_path / "void.git")).prepare()


def test_a_missing_remote_is_cloned_from_the_upstream(upstream: Path, tmp_path: Path) -> None:
    fork = Fork(str(tmp_path / "new.git"), str(upstream), tmp_path / "fork")
    publish(fork)
    branches = run_git(tmp_path / "new.git", "branch", "--format=%(refname:short)")
    assert branches.split() == ["main", "quasar"]
