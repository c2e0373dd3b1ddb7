"""git over real HTTP: where the token is sent, where it never appears, and outages."""

import logging
import os
import shutil
import threading
import traceback
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from neurons.miner.publishing.fork import Fork
from neurons.miner.publishing.github import open_fork
from neurons.runtime.errors import ConfigError, Held, Retry
from neurons.runtime.git.command import HardenedGit, Limits
from neurons.runtime.git.remote import Token
from neurons.runtime.loading import Sources
from neurons.runtime.settings import Settings
from tests.neurons.githost import CANARY, UPSTREAM, Answer, GitHub, serve
from tests.neurons.miner.publishing.forks import lay_out, publish
from tests.processes import is_alive, put_program, run_python, wait_for
from tests.repositories import run_git

NAME = "miner/flash-linear-attention"
INFO = f"GET /{NAME}.git/info/refs"


@pytest.fixture
def settings(host: GitHub, tmp_path: Path) -> Settings:
    flags = {
        "github_api_url": host.url,
        "github_upstream": UPSTREAM,
        "github_username": "miner",
        "github_token": SecretStr(CANARY),
        "state_dir": tmp_path / "state",
    }
    (tmp_path / "env").touch(0o600)
    return Sources(flags, tmp_path / "env", {}).settings()


def fork_of(host: GitHub, folder: Path, token: str | None = CANARY, **options: object) -> Fork:
    url = f"{host.url}/{NAME}.git"
    secret = Token(token, urlsplit(url).netloc) if token else None
    return Fork(url, None, folder / "clone", token=secret, **options)  # type: ignore[arg-type]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a git on PATH that records its arguments and secrets in its environment."""
    log, real = tmp_path / "recorded", shutil.which("git")
    put_program(
        tmp_path / "bin/git",
        f'printf "%s " "$@" >> {log}; echo >> {log}\n'
        f'env | grep -q {Token(CANARY).basic} && echo "HEADER-IN-ENVIRONMENT $1" >> {log}\n'
        f'env | grep -q {CANARY} && echo "TOKEN-IN-ENVIRONMENT $1" >> {log}\n'
        f'exec {real} "$@"',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return log


def everything_under(folder: Path) -> str:
    return "".join(
        file.read_bytes().decode(errors="replace") for file in folder.rglob("*") if file.is_file()
    )


def test_row_28_from_a_token_to_a_published_fork(host, settings, recorded, monkeypatch, caplog):
    """The fork is made, cloned, pushed and verified; nobody else can see the token."""
    caplog.set_level(logging.DEBUG)
    host.command_lines = set()
    monkeypatch.setenv("GITHUB_TOKEN", CANARY)  # exported by an operator
    fork = open_fork(settings)
    commit = publish(fork)
    assert run_git(host.folder / f"{NAME}.git", "rev-parse", "quasar") == commit

    basic = Token(CANARY).basic
    pushed = [headers for line, headers in host.seen if line.endswith("git-receive-pack")]
    assert pushed
    assert all(headers["Authorization"] == f"Basic {basic}" for headers in pushed)

    lines = recorded.read_text().splitlines()
    online = {"ls-remote", "fetch", "push"}
    assert online <= {line.split()[0] for line in lines if line.strip()}
    with_header = {line.split()[1] for line in lines if line.startswith("HEADER-IN")}
    assert with_header == {"push"}  # the fork is public, so it is read anonymously
    # Only online commands have the header, and none has the daemon's own variable.
    assert not with_header & {"init", "reset", "clean", "status", "commit-tree", "hash-object"}
    assert not [line for line in lines if line.startswith("TOKEN-IN")]

    assert any("git-remote-http" in line for line in host.command_lines)
    state = settings.state_dir
    for secret in (CANARY, basic):
        assert not [line for line in lines if secret in line]
        assert not [line for line in host.command_lines if secret in line]
        assert secret not in everything_under(state)
        assert secret not in caplog.text
        assert secret not in repr(vars(fork)) + fork.url + repr(settings)


def test_the_upstream_gets_no_token(host: GitHub, tmp_path: Path) -> None:
    host.add(NAME)
    run_git(host.folder, "init", "-q", "--bare", f"{NAME}.git")
    token = Token(CANARY, urlsplit(host.url).netloc)
    upstream_url = f"{host.url}/{UPSTREAM}.git"
    Fork(f"{host.url}/{NAME}.git", upstream_url, tmp_path / "clone", token=token).prepare()
    assert [line for line, _ in host.seen if f"/{UPSTREAM}.git/" in line]
    assert not [line for line in host.credentials if f"/{UPSTREAM}.git/" in line]


def test_another_host_gets_no_token(host: GitHub, tmp_path: Path) -> None:
    host.fork(NAME)
    url, token = f"{host.url}/{NAME}.git", Token(CANARY, "github.com")
    Fork(url, None, tmp_path / "clone", token=token).prepare()
    run_git(tmp_path, "clone", "-q", url, "mine")
    Fork(None, None, tmp_path / "unused", repo_path=tmp_path / "mine", token=token).prepare()
    assert (host.seen != [], host.credentials) == (True, [])


@pytest.mark.parametrize("token", [None, "expired-" + CANARY])
def test_row_28_a_missing_or_expired_token_is_held_with_the_scope(host, tmp_path, token):
    host.fork(NAME)
    fork = fork_of(host, tmp_path, token)
    commit = lay_out(fork)
    with pytest.raises(Held) as held:
        fork.push(commit)
    for words in ("GITHUB_TOKEN", "`public_repo`", "`repo`", "Contents: read and write"):
        assert words in held.value.remedy
    shown = "".join(traceback.format_exception(held.value))
    if token:
        assert token not in shown
        assert Token(token).basic not in shown


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(401, b"", {"WWW-Authenticate": "Basic"}), Held),
        (Answer(404, b"not here"), Held),
        (Answer(503, b""), Retry),
    ],
)
def test_http_errors_are_held_or_retried(host, tmp_path, answer, kind):
    host.fork(NAME)
    host.script[INFO] = [answer] * 2
    with pytest.raises(kind):
        fork_of(host, tmp_path).prepare()
    host.script.clear()
    fork_of(host, tmp_path).prepare()


def test_row_28_an_echoed_token_is_not_repeated(host: GitHub, tmp_path: Path) -> None:
    host.fork(NAME)
    body = f"you sent {CANARY} in Basic {Token(CANARY).basic}".encode()
    host.script[INFO] = [Answer(403, body, {"Content-Type": "text/plain"})] * 2
    with pytest.raises(Held) as held:
        fork_of(host, tmp_path).prepare()
    assert not [secret for secret in (CANARY, Token(CANARY).basic) if secret in str(held.value)]


def test_a_redirect_does_not_get_the_token(host: GitHub, tmp_path: Path) -> None:
    host.fork(NAME)
    (tmp_path / "other").mkdir()
    with serve(tmp_path / "other", host.folder / f"{UPSTREAM}.git") as other:
        place = {"Location": f"{other.url}/{NAME}.git/info/refs?service=git-upload-pack"}
        host.script[INFO] = [Answer(301, b"", place)] * 9
        fork = fork_of(host, tmp_path)
        with pytest.raises(Held):
            fork.push(lay_out(fork))
        assert other.seen  # it is read as validators read it
        assert other.credentials == []


def test_a_server_that_hangs_is_left_at_the_deadline(host, tmp_path, monkeypatch):
    host.fork(NAME)
    host.hang.clear()
    impatient = property(lambda self: HardenedGit(self.worktree, timeout=0.5))
    monkeypatch.setattr(Fork, "_git", impatient)
    with pytest.raises(Retry, match="took longer than"):
        fork_of(host, tmp_path).prepare()
    assert no_child_left()


def test_too_many_open_files_are_temporary(tmp_path: Path) -> None:
    code = (
        "import resource, sys\nfrom pathlib import Path\n"
        "from neurons.runtime.errors import Retry\n"
        "from neurons.runtime.git.command import HardenedGit\n"
        "tool = HardenedGit(Path(sys.argv[1]))\ntool.execute(['git', 'version'])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try:\n    tool.execute(['git', 'version'])\n"
        "except Retry as fault:\n    print(fault)\n"
    )
    assert "git cannot be started (Too many open files)" in run_python("-c", code, tmp_path).stdout


def test_a_stop_ends_a_running_command(host: GitHub, tmp_path: Path) -> None:
    host.fork(NAME)
    host.hang.clear()
    stop = threading.Event()
    timer = threading.Timer(0.5, stop.set)
    timer.start()
    with pytest.raises(Retry, match="stopped"):
        fork_of(host, tmp_path, stop=stop).prepare()
    timer.join()
    assert no_child_left()


def no_child_left() -> bool:
    """Return whether no child of this process is a git."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    names = [Path(f"/proc/{child}/comm") for child in children]
    return not [name for name in names if name.exists() and "git" in name.read_text()]


VERSION = '[ "$1" = version ] && exec echo git version 2.43.0'
"""What a fake git does first."""


def test_a_helper_that_outlives_git_is_killed(tmp_path, monkeypatch):
    note = tmp_path / "helper"
    put_program(tmp_path / "git", f"{VERSION}\nsleep 999 & echo $! > {note}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Retry, match="took longer than"):
        HardenedGit(tmp_path, timeout=0.5).status()
    helper = int(note.read_text())
    wait_for(lambda: not is_alive(helper))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("kill -XFSZ $$", "exceeded the limit of 4194304 bytes for a file"),
        ("kill -XCPU $$", "exceeded the limit of 9 s of CPU time"),
        ("kill -KILL $$", "exceeded a limit: 9 s of CPU time, 4294967296 bytes of memory"),
        ("kill -SEGV $$", "was killed by SIGSEGV"),
        ("exit 3", "ended with status 3 and without a message"),
    ],
)
def test_an_end_without_a_message_is_explained(end, reason, tmp_path, monkeypatch):
    put_program(tmp_path / "bin/git", f"{VERSION}\n{end}")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    tool = HardenedGit(tmp_path, limits=Limits(memory=2**32, file=2**22, seconds=9, output=2**20))
    with pytest.raises(Held, match=f"git checkout failed: it {reason}"):
        tool.execute(["git", "checkout"])


def test_a_missing_or_old_program_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="git is not installed"):
        HardenedGit(tmp_path).status()
    put_program(tmp_path / "git", "echo git version 2.25.1")
    with pytest.raises(ConfigError, match=r"git 2\.25\.1 is too old"):
        HardenedGit(tmp_path).status()
    put_program(tmp_path / "git", "echo git version 2.43.0")
    with pytest.raises(ConfigError, match=r"prlimit is not installed\. .* util-linux"):
        HardenedGit(tmp_path, limits=Limits(1, 1, 1, 1)).status()
