"""Settings: precedence, errors, the .env read as text, and .env.example."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from dotenv import dotenv_values

from neurons.embedded.settings import is_embedded
from neurons.miner import __main__ as miner
from neurons.runtime import env_example
from neurons.runtime.errors import EX_CONFIG, ConfigError
from neurons.runtime.loading import Process, Sources, read_env_file
from neurons.runtime.settings import Settings
from neurons.validator import __main__ as validator
from neurons.validator_api import __main__ as validator_api
from tests import PROJECT
from tests.neurons.miner.miner_command import BARE
from tests.processes import run

NOTHING: dict[str, str] = {}
HOTKEY = "5" + "F" * 47


@pytest.fixture(autouse=True)
def no_project_env_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("neurons.runtime.loading.ENV_FILE", tmp_path / "absent")


def env_file(folder: Path, text: str | bytes) -> Path:
    path = folder / ".env"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o600)
    return path


def problems(process: Process | None = None, **sources: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Sources(**sources).settings(process)
    return str(caught.value).splitlines()


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = env_file(tmp_path, "NETUID=1\nCLAIM_RUNS=4\nPORT=9001\n")
    settings = Sources(
        {"netuid": 3, "claim_runs": None},
        path,
        {"NETUID": "2", "PORT": "9002"},
    ).settings(defaults={"port": 9003, "claim_headroom": 0.5})
    assert (settings.netuid, settings.port) == (3, 9002)
    assert settings.claim_runs == 4  # a flag of None is ignored
    assert (settings.claim_headroom, settings.wallet_hotkey) == (0.5, "default")


def test_row_31_env_file_is_text_and_is_never_evaluated(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    path = env_file(
        tmp_path,
        "\ufeffexport GITHUB_USERNAME='ada'\r\n"
        'WALLET_HOTKEY="hot-1" # a comment\r\n'
        f"REFERENCE_MODEL=$(touch {proof})\r\n"
        "PYTORCH_CUDA_ALLOC_CONF=${GITHUB_USERNAME}`id`\r\n"
        "NETUID=\r\n",
    )
    settings = Sources(env_file=path, environ={"HOME": "/nowhere"}).settings()
    assert (settings.github_username, settings.wallet_hotkey) == ("ada", "hot-1")
    assert settings.reference_model == f"$(touch {proof})"
    assert settings.pytorch_cuda_alloc_conf == "${GITHUB_USERNAME}`id`"
    assert settings.netuid == 24  # an empty value means unset
    assert not proof.exists()


def test_row_31_all_errors_are_reported_with_value_origin_and_remedy(tmp_path: Path) -> None:
    text = "CLAIM_HEADROOM=2\nOPTIMIZATION_INTERVAL=nan\nthis line is not one\nGITHUB_TOKN=ghp_x\n"
    path = env_file(tmp_path, text)
    lines = problems(
        flags={"target_sequence_length": "-5"},
        env_file=path,
        environ={"VALIDATOR_API_URL": "http://example.org", "LOG_FORMAT": "xml"},
        process="miner",
    )
    text = "\n".join(lines)
    assert f"CLAIM_HEADROOM='2' ({path}): give a share from 0 to 0.9." in lines
    assert "TARGET_SEQUENCE_LENGTH='-5' (flag): give a whole number of tokens from 512" in text
    assert "LOG_FORMAT='xml' (environment): give console or json." in lines
    assert "VALIDATOR_API_URL='http://example.org'" in text
    assert "OPTIMIZATION_INTERVAL='nan'" in text
    assert f"line 3 of {path}" in text
    assert "GITHUB_TOKEN is not set" in text
    assert "GITHUB_USERNAME is not set" in text
    assert "GITHUB_TOKN is not a setting and is ignored: is GITHUB_TOKEN meant?" in lines
    assert len(lines) == 9


def test_all_problems_of_an_env_file_are_reported_at_once(tmp_path: Path) -> None:
    path = env_file(
        tmp_path,
        "# settings\n\nGITHUB_TOKEN=abc123\n\n  \nno setting here\nNETUID=x\n"
        'WALLET_HOTKEY="open\nCLAIM_RUNS=0\nREFERENCE_MODEL="m"\nPORT=-1\n',
    )
    path.chmod(0o644)
    lines = problems(env_file=path, environ=NOTHING)
    assert lines == [
        f"line 6 of {path} cannot be read: write NAME=value, its quotes closed.",
        f'WALLET_HOTKEY cannot be read (line 8 of {path}): close the quote " in its line.',
        f"GITHUB_TOKEN=[redacted] ({path}): does not have the form of a GitHub token: give a "
        "GitHub token, `ghp_...` or `github_pat_...`.",
        f"NETUID='x' ({path}): give a whole number from 0 to 65535.",
        f"CLAIM_RUNS='0' ({path}): give a whole number from 1 to 20.",
        f"PORT='-1' ({path}): give a port from 0 to 65535.",
        f"others can read {path}: chmod 600 {path}",
    ]


def test_an_unclosed_quote_is_reported_without_the_parts_of_its_value(tmp_path: Path) -> None:
    path = env_file(tmp_path, "GITHUB_TOKEN='ghp_a\ncanary==\ncanary='\nGITHUB_USERNAME=ada\n")
    environ = {"VALIDATOR_API_URL": "https://a.org"}
    assert problems(env_file=path, environ=environ, process="miner") == [
        f"GITHUB_TOKEN cannot be read (line 1 of {path}): close the quote ' in its line.",
        f"line 3 of {path} cannot be read: write NAME=value, its quotes closed.",
    ]


BAD_VALUES = {
    "VALIDATOR_API_URL": (
        *("http://192.168.1.9:8000", "https://user:pw@example.org", "ftp://example.org"),
        *("https://example.org/?api=1", "https://example.org#top", "https://a:b", "https://a b"),
    ),
    "INFERENCE_SERVERS": (
        *("https://miner.example.org", f"{HOTKEY}=ftp://miner.example.org"),
        f"{HOTKEY}=https://miner:x",
    ),
    "FORK_REMOTE": ("https://token@github.com/a/b",),
    "FORK_HOSTS": ("https://github.com", "git.example.org:8443"),
    "GITHUB_TOKEN": ("ghp_é", "abc123"),
    "GITHUB_UPSTREAM": ("no-owner",),
    "GITHUB_USERNAME": ("your_github_username",),
    "TARGET_SEQUENCE_LENGTH": ("511", "99999999999999999999"),
    "BENCH_TIMEOUT_SECONDS": ("inf",),
    "OPTIMIZATION_INTERVAL": ("1e30",),
    "SUBTENSOR_NETWORK": ("finey",),
    "VALIDATOR_HOTKEYS": ("validator",),
    "WALLET_MINER_NAME": ("..", "feature/x"),
    "FORK_BRANCH": ("feature/x",),
    "HOST": ("127.0.0.1:8000",),
    "PORT": ("65536",),
    "DEVICE": ("tpu",),
}


@pytest.mark.parametrize("variable", BAD_VALUES)
def test_a_bad_value_is_reported_by_name(variable: str) -> None:
    for value in BAD_VALUES[variable]:
        (line,) = problems(environ={variable: value})
        shown = "[redacted]" if variable == "GITHUB_TOKEN" else repr(value)
        assert line.startswith(f"{variable}={shown} (environment): ")
        assert "give " in line
        allowed = "only letters, digits, dots, hyphens and underscores"
        assert allowed in line or value != "feature/x"


BAD_HOSTS = ("a..b", "xn--", "x" * 64 + ".example", "☃.example", "é" * 60, "999.1.1.1", "n[::b]")
ADDRESSES = {
    **dict.fromkeys(
        ("VALIDATOR_API_URL", "GITHUB_API_URL", "REFERENCE_INFERENCE_URL"), "https://{}"
    ),
    **dict.fromkeys(("FORK_REMOTE", "FORK_UPSTREAM_URL", "ALERT_URL"), "https://{}/path"),
    **dict.fromkeys(("HOST", "INFERENCE_HOST"), "{}"),
    "SUBTENSOR_NETWORK": "wss://{}",
    "INFERENCE_SERVERS": HOTKEY + "=https://{}",
}


@pytest.mark.parametrize("variable", ADDRESSES)
def test_a_host_that_no_client_can_look_up_is_reported(variable: str) -> None:
    for host in BAD_HOSTS:
        (line,) = problems(environ={variable: ADDRESSES[variable].format(host)})
        assert line.startswith(f"{variable}="), line
        assert "give " in line
    fields = [name for name in Settings.model_fields if re.search("url$|host$|net.*k$", name)]
    # the driver checks the URL of the database
    assert {name.upper() for name in fields} - {"DATABASE_URL"} <= set(ADDRESSES)


@pytest.mark.parametrize(
    "host", ["api.example", "müller.example", "10.1.2.3", "[::1]:8000", "a_b."]
)
def test_a_host_that_can_be_looked_up_is_taken(host: str) -> None:
    address = f"https://{host}"
    environ = {name: address for name in ADDRESSES if "URL" in name}
    assert Sources(environ=environ).settings().validator_api_url == address


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("VALIDATOR_API_URL", "https://example.org/", "https://example.org"),
        ("VALIDATOR_API_URL", "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("TARGET_SEQUENCE_LENGTH", "auto", "auto"),
        ("TARGET_SEQUENCE_LENGTH", "1000000", 1_000_000),
        ("VALIDATOR_HOTKEYS", f"{HOTKEY}, {HOTKEY}", (HOTKEY, HOTKEY)),
        ("INFERENCE_SERVERS", f"{HOTKEY}=https://a.org:1/x", (f"{HOTKEY}=https://a.org:1/x",)),
        ("FORK_HOSTS", "GitHub.com, git.example.org", ("github.com", "git.example.org")),
        ("SUBTENSOR_NETWORK", "wss://example.org:9944", "wss://example.org:9944"),
        ("HOST", "::1", "::1"),
        ("STATE_DIR", "/var/lib/quasar", Path("/var/lib/quasar")),
        ("STATE_DIR", "state-2", PROJECT / "state-2"),
    ],
)
def test_a_good_value_is_read(variable: str, value: str, expected: object) -> None:
    assert getattr(Sources(environ={variable: value}).settings(), variable.lower()) == expected


def test_the_token_requires_the_username_and_another_repository_no_token() -> None:
    api = {"VALIDATOR_API_URL": "https://example.org"}
    for place in ("REPO_PATH", "FORK_REMOTE"):
        settings = Sources(environ=api | {place: "/srv/fork"}).settings("miner")
        assert settings.github_token is None
    environ = api | {"GITHUB_TOKEN": "ghp_" + "x" * 36}
    (line,) = problems(environ=environ, process="miner")
    assert line.startswith("GITHUB_USERNAME is not set")
    assert Sources(environ=environ).settings("validator").github_username is None


def test_row_31_unknown_and_outdated_keys_give_warnings(tmp_path: Path) -> None:
    path = env_file(tmp_path, "GITHUB_TOKN=ghp_canary\nMINER_MODEL_NAME=a\nHF_TOKEN=5\n")
    warnings = "\n".join(map(str, Sources(env_file=path, environ=NOTHING).settings().warnings))
    assert "GITHUB_TOKN is not a setting and is ignored: is GITHUB_TOKEN meant?" in warnings
    assert "MINER_MODEL_NAME is ignored: " in warnings
    assert "HF_TOKEN is ignored: no gated model" in warnings
    assert "canary" not in warnings
    assert "chmod" not in warnings  # nobody else can read this file


def test_a_repeated_name_is_reported_and_its_last_line_counts(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("NETUID=5\nDEVICE=cpu\nNETUID=\nDEVICE=cuda\n")
    path.chmod(0o600)
    file = read_env_file(path, ("NETUID", "DEVICE"))
    assert file.values == {"DEVICE": "cuda"}
    assert [str(problem) for problem in file.ignored] == [
        f"{name} stands in lines {first} and {first + 2} of {path}: the last line counts; "
        "remove the others."
        for name, first in (("NETUID", 1), ("DEVICE", 2))
    ]


def test_row_31_a_named_file_must_exist_and_be_text(tmp_path: Path) -> None:
    assert "No settings file" in problems(env_file=tmp_path / "missing")[0]
    assert "save it as UTF-8" in problems(env_file=env_file(tmp_path, b"A=\xff\xfe\n"))[0]


@pytest.mark.parametrize("kind", ["folder", "broken link"])
def test_a_dotenv_that_is_no_file_is_not_taken_for_a_missing_one(tmp_path, monkeypatch, kind):
    env_file = tmp_path / ".env"
    monkeypatch.setattr("neurons.runtime.loading.ENV_FILE", env_file)
    assert is_embedded(Sources(environ={}))
    env_file.mkdir() if kind == "folder" else env_file.symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigError, match=rf"No settings file at {env_file} \(a {kind}\)"):
        is_embedded(Sources(environ={}))


def test_the_environment_can_name_the_file_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr("neurons.runtime.loading.ENV_FILE", env_file(tmp_path, "NETUID=7\n"))
    other = tmp_path / "other"
    other.write_text("NETUID=8\n")
    assert Sources(environ=NOTHING).settings().netuid == 7
    assert Sources(environ={"ENV_FILE": str(other)}).settings().netuid == 8
    assert Sources(environ={"ENV_FILE": "/dev/null"}).settings().netuid == 24
    assert Sources(env_file=Path("/dev/null"), environ=NOTHING).settings().netuid == 24


WATCHED: dict[str, int] = {}
"""How often each of these files was opened."""


def count_reads(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]) in WATCHED:
        WATCHED[str(arguments[0])] += 1


sys.addaudithook(count_reads)


@pytest.mark.usefixtures("no_software")
@pytest.mark.parametrize(
    ("main", "arguments", "text"),
    [
        (miner.main, ["status"], ""),
        (miner.main, ["logs", "--no-follow"], ""),
        (miner.main, ["doctor"], "NETUID=nothing\n"),  # finds the state folder nevertheless
        (miner.main, ["status"], "NETUID=nothing\n"),
        (miner.main, [], "NETUID=nothing\n"),
        (validator.main, ["--once"], ""),  # ends because no API is set
        (validator_api.main, [], "PORT=nothing\n"),
    ],
)
def test_a_process_reads_the_env_file_once(main, arguments, text, tmp_path, monkeypatch):
    path = env_file(tmp_path, f"STATE_DIR={tmp_path / 'state'}\nDEVICE=cpu\n{text}")
    monkeypatch.setattr(os, "environ", BARE | {"HOME": str(tmp_path), "ENV_FILE": str(path)})
    WATCHED[str(path)] = 0
    main(arguments)
    assert WATCHED.pop(str(path)) == 1


def test_printed_settings_contain_no_secrets() -> None:
    environ = {"GITHUB_TOKEN": "ghp_canary", "DATABASE_URL": "postgresql://u:canary@h/d"}
    settings = Sources(environ=environ).settings()
    assert "canary" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.secrets() == list(environ.values())


def test_env_example_is_up_to_date_and_gives_the_defaults(tmp_path: Path) -> None:
    text = env_example.EXAMPLE.read_text(encoding="utf-8")
    assert text == env_example.render(), "run: python -m neurons.runtime.env_example"
    # With all lines uncommented, the file gives exactly the defaults.
    lines = [line.removeprefix("# ") for line in text.splitlines() if "=" in line.split(" ")[-1]]
    assigned = [
        line for line in lines if line.split("=")[0] in map(str.upper, Settings.model_fields)
    ]
    path = env_file(tmp_path, "\n".join(assigned))
    assert set(dotenv_values(path)) == {name.upper() for name in Settings.model_fields}
    assert Sources(env_file=path, environ=NOTHING).settings() == Sources(environ=NOTHING).settings()


def test_a_user_without_a_home_folder_needs_absolute_paths(tmp_path: Path) -> None:
    """In a container started with --user, a user may have neither HOME nor an account."""
    no_account = (
        "import pwd, runpy, sys\n"
        "def unknown(name): raise KeyError(name)\n"
        "pwd.getpwuid = pwd.getpwnam = unknown\n"
        "sys.argv = ['miner', 'status']\n"
        "runpy.run_module('neurons.miner', run_name='__main__')\n"
    )
    given = {"PATH": os.environ["PATH"], "ENV_FILE": "", "STATE_DIR": str(tmp_path / "state")}
    done = run(sys.executable, "-c", no_account, cwd=PROJECT, env=given)
    assert done.returncode == 0, done.stderr
    assert "none yet" in done.stdout
    given["STATE_DIR"] = "~nobody/state"
    done = run(sys.executable, "-c", no_account, cwd=PROJECT, env=given)
    assert done.returncode == EX_CONFIG, done.stderr
    assert done.stderr.startswith("STATE_DIR=~nobody/state: the user has no home folder")
