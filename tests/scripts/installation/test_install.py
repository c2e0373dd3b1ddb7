"""scripts/install.sh, called by itself or by a start: what it makes, mends, refuses and keeps."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from neurons.errors import EX_CONFIG
from tests import PROJECT
from tests.processes import HANG, run
from tests.scripts.installation.checkout import Checkout

NOBODY = 65534


def test_a_changed_dependency_installs_again_and_keeps_the_extras(checkout: Checkout) -> None:
    env = os.environ | {"PIP_NO_INDEX": "1", "PYTHON": checkout.python}
    run(checkout.root / "scripts/install.sh", "dev", env=env, check=True)
    assert "extras=dev\n" in checkout.stamp()
    with (checkout.root / "pyproject.toml").open("a") as pyproject:
        pyproject.write("# changed\n")
    assert checkout.run()[0] == 0
    assert checkout.builds() == 2
    assert "extras=dev\n" in checkout.stamp()


@pytest.mark.parametrize("word", ["-x", "devv", "dev,"])
def test_what_is_no_extra_is_refused_and_not_remembered(checkout: Checkout, word: str) -> None:
    env = os.environ | {"PIP_NO_INDEX": "1", "PYTHON": checkout.python}
    script = checkout.root / "scripts/install.sh"
    refused = run(script, "dev", word, env=env)
    assert refused.returncode == EX_CONFIG
    assert f"no extra '{word}': give some of dev" in refused.stderr
    assert not (checkout.root / ".venv").exists()
    assert checkout.run()[0] == 0


def test_an_extra_that_was_recorded_and_is_none_any_more_is_left_out(checkout: Checkout) -> None:
    assert checkout.run()[0] == 0
    stamp = checkout.root / ".venv/quasar-install"
    stamp.write_text(stamp.read_text().replace("extras=", "extras=--help,dev"))
    assert checkout.run()[0] == 0
    assert "extras=dev\n" in checkout.stamp()


def test_its_help_installs_nothing(checkout: Checkout) -> None:
    shown = run(checkout.root / "scripts/install.sh", "--help")
    assert shown.returncode == 0
    assert shown.stdout.endswith("Extras: dev\n")
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_installation_is_made_anew(
    checkout: Checkout, hanging: subprocess.Popen[str], sent: signal.Signals
) -> None:
    half_installed = checkout.root / ".venv/half-installed"
    half_installed.touch()
    os.killpg(hanging.pid, sent)
    assert hanging.wait(timeout=HANG) != 0
    (checkout.root / "hang").unlink()
    status, out, err = checkout.run()
    assert status == 0, err
    assert json.loads(out)[1] == str(checkout.root)
    assert not half_installed.exists()


def test_a_driver_that_is_missing_for_a_moment_keeps_the_cuda_build(checkout: Checkout) -> None:
    checkout.tool("nvidia-smi", "echo GPU 0")
    _, _, err = checkout.run()
    assert "build=cuda\n" in checkout.stamp()
    assert "no NVIDIA GPU" not in err
    checkout.tool("nvidia-smi", "exit 9")
    assert checkout.run()[0] == 0
    assert checkout.builds() == 1


def test_without_a_new_enough_python_the_remedy_is_named(checkout: Checkout) -> None:
    for name in ("python3", *(f"python3.{minor}" for minor in range(8, 16))):
        checkout.tool(name, "exit 1")
    status, _, err = checkout.run(PYTHON="")
    assert status == EX_CONFIG
    assert "Python 3.10 to 3.13 was not found" in err
    assert "apt install python3 python3-venv" in err
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo 3.14", "is Python 3.14"), ("echo 3.9", "is Python 3.9"), ("exit 1", "does not run")],
)
def test_a_named_python_that_will_not_do_is_not_replaced_by_another(
    checkout: Checkout, script: str, reason: str
) -> None:
    checkout.tool("mine", script)
    status, _, err = checkout.run(PYTHON="mine")
    assert status == EX_CONFIG
    assert f"PYTHON=mine {reason}: name one of Python 3.10 to 3.13" in err
    assert not (checkout.root / ".venv").exists()


def test_a_named_python_that_is_not_the_installed_one_is_not_ignored(installed: Checkout) -> None:
    before = installed.builds()
    other = 'case "$2" in *version_info*) echo 3.99; exit;; esac'
    installed.tool("other", other.replace("3.99", "3.10" if sys.version_info[1] > 10 else "3.11"))
    status, _, err = installed.run(PYTHON="other")
    assert status == EX_CONFIG
    assert "PYTHON=other is Python 3.1" in err
    assert f".venv holds 3.{sys.version_info.minor}" in err
    assert installed.builds() == before


@pytest.mark.parametrize("found", ["nothing", "moved", "unusable"])
def test_what_cannot_be_written_is_left_as_it_is(found: str) -> None:
    # pytest's own folders are closed to others
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        checkout = Checkout(Path(name))
        checkout.user = NOBODY if os.geteuid() == 0 else None
        if found != "nothing":
            (checkout.root / ".venv/bin").mkdir(parents=True)
            root = checkout.root if found == "unusable" else "/elsewhere"
            (checkout.root / ".venv/quasar-install").write_text(f"root={root}\nbuild=cpu\n")
            python = "/bin/true" if found == "moved" else checkout.root / "backend.py"
            (checkout.root / ".venv/bin/python").symlink_to(python)
        before = sorted(checkout.root.rglob("*"))
        for path in (*before, checkout.root):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o222)
        status, out, err = checkout.run(PYTHON="")
        assert (status, out) == (EX_CONFIG, "")
        assert err.startswith(f"install: {checkout.root} cannot be written")
        assert err.endswith("(chown, chmod u+w), or clone to a folder of yours.\n")
        assert len(err.splitlines()) == 1
        assert sorted(checkout.root.rglob("*")) == before
        if found == "unusable":
            status, out, err = checkout.run("status")
            assert (status, out) == (EX_CONFIG, "")
            assert err.startswith(f"this user may not execute {checkout.root}/.venv/bin/python:")


def test_without_the_venv_module_its_package_is_named(checkout: Checkout) -> None:
    lame = f'case "$2" in *ensurepip*) exit 1;; esac\nexec "{sys.executable}" "$@"'
    for name in ("python3", *(f"python3.{minor}" for minor in range(8, 16))):
        checkout.tool(name, lame)
    status, _, err = checkout.run(PYTHON="")
    assert status == EX_CONFIG
    assert f"apt install python3.{sys.version_info.minor}-venv" in err


def test_a_full_disk_is_said_before_anything_is_made(checkout: Checkout) -> None:
    checkout.tool("df", "echo 'Filesystem Blocks Used Free'; echo '/dev/x 9 9 2097152 1% /'")
    status, _, err = checkout.run()
    assert status == EX_CONFIG
    assert "2 GB free" in err
    assert not (checkout.root / ".venv").exists()


def test_a_virtual_environment_of_somebody_else_is_left_alone(checkout: Checkout) -> None:
    kept = checkout.root / ".venv/mine.txt"
    kept.parent.mkdir()
    kept.touch()
    status, _, err = checkout.run()
    assert status == EX_CONFIG
    assert "was not made by this script" in err
    assert kept.exists()


def test_an_unreachable_index_is_worth_another_try(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, dependencies='"idna"')
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    status, _, err = checkout.run(PIP_NO_INDEX="0", **offline)
    assert status == 1
    assert "index could not be reached" in err


def test_the_locked_pytorch_is_taken_as_a_cpu_build_where_an_index_has_one(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, dependencies='"torch>=2.7"')
    (lock,) = re.findall(r"^torch==(\S+)", (PROJECT / "requirements/lock.txt").read_text(), re.M)
    index = tmp_path / "index/torch"
    index.mkdir(parents=True)
    for version in (lock, f"{lock}+cpu", "99.0"):
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(index / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            facts = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
            wheel.writestr(f"{info}/METADATA", facts)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    links = "".join(f'<a href="{path.name}">{path.name}</a>' for path in sorted(index.iterdir()))
    (index / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    url = index.parent.as_uri()
    status, _, err = checkout.run(TORCH_INDEX_URL=url, PIP_NO_INDEX="0", PIP_INDEX_URL=url)
    assert status == 0, err
    installed = (checkout.root / ".venv").glob("lib/*/site-packages/torch-*.dist-info")
    assert [path.name for path in installed] == [f"torch-{lock}+cpu.dist-info"]
