"""REPO_PATH: an existing checkout is used in place, without its hooks and filters.

A checkout is refused, for example, if it is dirty or if its git settings redirect git.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from neurons.miner.publishing.fork import Fork
from neurons.runtime.errors import Held
from neurons.runtime.git.remote import Token
from quasar_kernels.contract import overlay_files
from tests.neurons.miner.publishing.forks import publish
from tests.processes import put_program
from tests.repositories import GIT_ENVIRONMENT, make_repository, run_git
from tests.repositories import commit as commit_files

CHUNK = "fla/ops/quasar/chunk.py"
TOKEN = Token("t0ken", "github.com")

pytestmark = pytest.mark.usefixtures("overlay")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {"README.md": "fork\n", CHUNK: "# old\n", "data.bin": "plain\n"}
    return make_repository(tmp_path_factory.mktemp("repository") / "fork.git", files)


@pytest.fixture
def remote(repository: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(repository, tmp_path / "fork.git"))


@pytest.fixture
def checkout(remote: Path, tmp_path: Path) -> Path:
    run_git(tmp_path, "clone", "-q", str(remote), "checkout")
    return tmp_path / "checkout"


def use(checkout: Path, token: Token | None = None) -> Fork:
    return Fork(None, None, checkout.parent / "unused", repo_path=checkout, token=token)


def expect_held(checkout: Path, words: str | None = None) -> Held:
    """Return the Held that `prepare` raises; its reason or remedy must match `words`."""
    with pytest.raises(Held, match=words) as held:
        use(checkout).prepare()
    return held.value


def test_the_checkouts_branch_and_origin_are_used(checkout, remote, overlay):
    run_git(checkout, "checkout", "-q", "-b", "mine")
    commit_files(checkout, {"notes.txt": "the owner's commit\n"})
    fork = use(checkout)
    assert (fork.url, fork.worktree) == (f"file://{remote}", checkout)
    commit = publish(fork)
    assert run_git(remote, "rev-parse", "mine") == commit
    assert run_git(checkout, "rev-parse", "HEAD") == commit
    assert run_git(checkout, "status", "--porcelain") == ""
    assert publish(use(checkout)) == commit
    for name in overlay_files(root=overlay):
        assert (checkout / name).read_bytes() == (overlay / name).read_bytes()


def test_a_dirty_checkout_is_refused_and_left_unchanged(checkout: Path) -> None:
    (checkout / "README.md").write_text("my unsaved work\n")
    (checkout / CHUNK).write_text("# my own idea\n")
    (checkout / "staged.txt").touch()
    run_git(checkout, "add", "-A")
    (checkout / "new file.txt").write_text("untracked\n")
    before = run_git(checkout, "status", "--porcelain")
    held = expect_held(checkout, "uncommitted changes")
    for name in ("README.md", CHUNK, "staged.txt", "new file.txt"):
        assert name in held.reason
    assert run_git(checkout, "status", "--porcelain") == before
    assert (checkout / CHUNK).read_text() == "# my own idea\n"


def test_a_checkout_of_another_project_is_refused_and_left_unchanged(checkout: Path) -> None:
    run_git(checkout, "rm", "-r", "-q", "fla")
    tip = commit_files(checkout, {"README.md": "the miner's own checkout"})
    run_git(checkout, "push", "-q", "origin", "HEAD")
    expect_held(checkout, "REPO_PATH=.* is not a checkout of flash-linear-attention")
    assert (run_git(checkout, "rev-parse", "HEAD"), (checkout / "fla").exists()) == (tip, False)


def test_an_interrupted_run_continues(checkout: Path, overlay: Path) -> None:
    names = overlay_files(root=overlay)
    for name in names[: len(names) // 2]:  # copied and not committed
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((overlay / name).read_bytes())
    run_git(checkout, "add", CHUNK)
    publish(use(checkout))
    assert run_git(checkout, "status", "--porcelain") == ""


def test_a_detached_head_is_refused(checkout: Path) -> None:
    run_git(checkout, "checkout", "-q", "--detach")
    expect_held(checkout, "not on a branch")


def test_a_folder_that_is_not_the_top_of_a_checkout_is_refused(checkout, tmp_path):
    held = expect_held(checkout / "fla", "not a git checkout")
    assert "REPO_PATH" in str(held)
    (tmp_path / "empty").mkdir()
    expect_held(tmp_path / "empty", "not a git checkout")
    expect_held(tmp_path / "absent", "missing")


def test_a_checkout_behind_its_remote_is_not_moved(checkout: Path, tmp_path: Path) -> None:
    run_git(tmp_path, "clone", "-q", str(checkout.parent / "fork.git"), "other")
    run_git(tmp_path / "other", "commit", "-q", "--allow-empty", "-m", "Later")
    run_git(tmp_path / "other", "push", "-q")
    before = run_git(checkout, "rev-parse", "HEAD")
    held = expect_held(checkout, "behind its remote")
    assert "git pull --ff-only" in held.remedy
    assert run_git(checkout, "rev-parse", "HEAD") == before


@pytest.mark.parametrize(
    ("origin", "token", "url", "protocol"),
    [
        ("git@github.com:Me/fork.git", TOKEN, "https://github.com/Me/fork", "https"),
        ("git@github.com:Me/fork.git", None, "https://github.com/Me/fork", "ssh"),
        ("ssh://git@github.com/Me/fork", TOKEN, "https://github.com/Me/fork", "https"),
        ("https://github.com/Me/fork.git/", None, "https://github.com/Me/fork", "https"),
        ("../fork.git", None, None, "file"),
    ],
)
def test_the_origins_public_address(checkout, origin, token, url, protocol):
    run_git(checkout, "remote", "set-url", "origin", origin)
    fork = use(checkout, token)
    assert fork._remote.protocol == protocol
    if url is None:
        commit = publish(fork)
        assert run_git(checkout.parent / "fork.git", "rev-parse", "main") == commit
    else:
        assert fork.url == url


def test_a_credential_in_the_origin_is_refused_and_not_shown(checkout: Path) -> None:
    run_git(checkout, "remote", "set-url", "origin", "https://me:ghs-in-url@github.com/me/fork")
    held = expect_held(checkout, "credential")
    assert "ghs-in-url" not in str(held)
    assert "remote set-url" in held.remedy


def trap(checkout: Path) -> tuple[Path, Path]:
    """Return a program that creates a file, and that file."""
    sprung = checkout.parent / "sprung"
    return put_program(checkout.parent / "trap.sh", f"touch {sprung}\ncat"), sprung


def test_row_29_programs_that_the_checkout_names_do_not_run(checkout: Path) -> None:
    program, sprung = trap(checkout)
    hooks = checkout / ".git" / "hooks"
    other_hooks = checkout.parent / "other-hooks"
    for folder in (hooks, other_hooks):
        folder.mkdir(exist_ok=True)
        for name in (
            *("pre-commit", "post-commit", "prepare-commit-msg", "commit-msg", "pre-push"),
            *("reference-transaction", "post-index-change", "post-checkout", "fsmonitor-watchman"),
        ):
            shutil.copy(program, folder / name)
    (checkout / ".git/info").mkdir(exist_ok=True)
    (checkout / ".git/info/attributes").write_text("* filter=evil diff=evil merge=evil\n")
    programs = (
        *("core.fsmonitor", "core.sshCommand", "core.askPass", "core.editor", "core.pager"),
        *("credential.helper", "filter.evil.clean", "filter.evil.smudge", "filter.evil.process"),
        *("diff.external", "diff.evil.textconv", "gpg.program"),
    )
    settings = {"filter.evil.required": "true", "commit.gpgSign": "true"}
    settings |= {"core.hooksPath": str(other_hooks), **dict.fromkeys(programs, str(program))}
    for name, value in settings.items():
        run_git(checkout, "config", name, value)
    (checkout / "data.bin").write_text("plain\n")  # a new time stamp, so that git reads the file
    publish(use(checkout))
    assert not sprung.exists()
    # plain git runs the traps
    subprocess.run(["git", "status"], cwd=checkout, env=GIT_ENVIRONMENT, capture_output=True)
    assert sprung.exists()


@pytest.mark.parametrize(
    "name",
    [
        *("url.https://evil.example/.insteadOf", "url.ext::sh.pushInsteadOf", "core.worktree"),
        *("core.alternateRefsCommand", "remote.origin.pushurl", "remote.origin.receivepack"),
        *("remote.origin.vcs", "http.proxy", "http.https://github.com/.extraheader"),
        *("http.https://github.com/me.sslVerify", "hook.evil.command"),
    ],
)
def test_git_settings_that_redirect_or_run_programs_are_refused(checkout: Path, name: str) -> None:
    value = str(checkout) if name == "core.worktree" else "https://github.com/"
    run_git(checkout, "config", name, value)
    held = expect_held(checkout)
    assert name.lower() in held.reason.lower()
    assert (checkout / CHUNK).read_text() == "# old\n"


def test_a_worktree_set_elsewhere_is_refused(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    run_git(checkout, "config", "core.worktree", str(tmp_path / "victim"))
    expect_held(checkout, "not the top of its checkout")
    assert list((tmp_path / "victim").iterdir()) == []


def test_included_git_settings_are_checked(checkout: Path) -> None:
    (checkout / ".git/more").write_text('[url "https://evil.example/"]\n\tinsteadOf = https://\n')
    run_git(checkout, "config", "include.path", "more")
    expect_held(checkout, "insteadof")


@pytest.mark.parametrize("place", ["fla/ops/quasar", "fla", CHUNK])
def test_nothing_is_written_through_a_link(checkout: Path, place: str) -> None:
    outside = checkout.parent / "outside"
    (outside / "ops/quasar").mkdir(parents=True)
    (outside / "ops/quasar/chunk.py").write_text("untouched\n")
    run_git(checkout, "rm", "-rq", place)
    (checkout / place).parent.mkdir(parents=True, exist_ok=True)
    target = outside / "ops/quasar/chunk.py" if place == CHUNK else outside
    (checkout / place).symlink_to(target)
    commit_files(checkout)
    before = sorted(outside.rglob("*"))
    expect_held(checkout, "symbolic link")
    assert sorted(outside.rglob("*")) == before
    assert (outside / "ops/quasar/chunk.py").read_text() == "untouched\n"
