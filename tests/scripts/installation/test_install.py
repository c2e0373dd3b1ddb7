"""scripts/install.sh, called directly or by a start script."""

import json
import os
import re
import signal
import socket
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from neurons.runtime.errors import EX_CONFIG
from tests import PROJECT
from tests.processes import HANG, run, wait_for
from tests.scripts.installation.checkout import Checkout
from tests.servers import free_port, serving

NOBODY = 65534


def test_a_changed_dependency_installs_again_and_keeps_the_extras(checkout: Checkout) -> None:
    assert checkout.install("all").returncode == 0
    assert "extras=metrics,miner,server\n" in checkout.stamp()  # all but the developers'
    assert checkout.run()[0] == 0  # START_MINER.sh then installs nothing
    assert checkout.builds() == 1
    checkout.change_dependencies()
    stamp = checkout.root / ".venv/quasar-install"
    stamp.write_text(stamp.read_text().replace("extras=", "extras=--help,"))  # no longer an extra
    assert checkout.install("dev").returncode == 0
    assert checkout.builds() == 2
    assert "extras=dev,metrics,miner,server\n" in checkout.stamp()


def unreadable(checkout: Checkout) -> str:
    """Return the files of the installation that other users cannot read."""
    return run("find", f"{checkout.root}/.venv/", "!", "-type", "l", "!", "-perm", "-004").stdout


def test_other_users_can_read_an_installation_made_under_a_strict_umask(checkout: Checkout) -> None:
    earlier = os.umask(0o077)
    try:
        assert checkout.install("miner").returncode == 0
        assert unreadable(checkout).replace(str(checkout.root), "") == ""
        for change in (lambda: None, checkout.change_dependencies):
            run("chmod", "-R", "go=", f"{checkout.root}/.venv/", check=True)  # an earlier version
            assert unreadable(checkout) != ""
            change()
            assert checkout.install("miner").returncode == 0
            assert unreadable(checkout).replace(str(checkout.root), "") == ""
    finally:
        os.umask(earlier)


@pytest.mark.parametrize("word", ["-x", "devv", "dev,"])
def test_an_unknown_extra_is_rejected_and_not_recorded(checkout: Checkout, word: str) -> None:
    refused = checkout.install("dev", word)
    assert refused.returncode == EX_CONFIG
    assert f"no extra '{word}': give some of dev metrics miner server" in refused.stderr
    assert not (checkout.root / ".venv").exists()


def test_an_interrupted_installation_starts_again(checkout, hanging):
    (half_installed,) = (checkout.root / ".venv.d").iterdir()
    os.killpg(hanging.pid, signal.SIGINT)
    assert hanging.wait(timeout=HANG) != 0
    assert not (checkout.root / ".venv").exists()
    (checkout.root / "hang").unlink()
    status, out, err = checkout.run()
    assert status == 0, err
    assert json.loads(out)[1] == str(checkout.root)
    assert f"removing .venv.d/{half_installed.name}, an installation that was interrupted" in err
    assert [*(checkout.root / ".venv.d").iterdir()] == [(checkout.root / ".venv").resolve()]


def test_a_slow_removal_of_an_unused_installation_is_reported(checkout: Checkout) -> None:
    assert checkout.run()[0] == 0
    (checkout.root / ".venv.d/9").mkdir()
    checkout.tool("rm", 'sleep 1; exec /bin/rm "$@"')
    # ten seconds of the script pass in each of its pauses
    clock = {"BASH_FUNC_sleep%%": "() { SECONDS=$((SECONDS + 10)); command sleep 0.1; }"}
    status, _, err = checkout.run(**clock)
    assert status == 0, err
    assert re.search(r"^install:   \d+ s: rm -rf$", err, re.MULTILINE), err
    assert not (checkout.root / ".venv.d/9").exists()


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the files of an installation, without those that Python caches."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path: path.read_bytes() for path in files}


CHILD = "import pip, sys; print(sys.executable)"


@pytest.mark.parametrize(
    ("earlier", "sent"),
    [(False, signal.SIGKILL), (True, signal.SIGTERM)],
    ids=["link", "folder of an earlier version"],
)
def test_running_processes_keep_their_installation(checkout, earlier, sent):
    assert checkout.run()[0] == 0
    link = checkout.root / ".venv"
    if earlier:
        first = link.resolve()
        link.unlink()
        first.rename(link)
        for path in (*link.glob("bin/*"), link / "pyvenv.cfg"):
            if path.is_file() and not path.is_symlink() and b"\0" not in path.read_bytes():
                path.write_text(path.read_text().replace(str(first), str(link)))
    miner = checkout.start(WAIT="1")
    assert miner.stdout is not None
    pid, _, _, _ = json.loads(miner.stdout.readline())
    python = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    before = contents(Path(python).parents[1])
    # as the miner starts its workers: by its own interpreter's path
    assert run(python, "-c", CHILD, check=True).stdout == f"{python}\n"

    checkout.change_dependencies()
    (checkout.root / "hang").touch()
    builds = checkout.builds()
    update = checkout.start("once")
    wait_for(lambda: checkout.builds() > builds, child=update)
    os.killpg(update.pid, sent)
    assert update.wait(timeout=HANG) != 0
    update.communicate()
    assert run(python, "-c", CHILD, check=True).stdout == f"{python}\n"
    assert json.loads(checkout.run("status")[1])[2] == ["status"]

    (checkout.root / "hang").unlink()
    status, _, err = checkout.run("once")
    assert status == 0, err
    assert "an installation that was interrupted" in err
    assert f"restart the processes {pid} to use the new installation" in err
    assert run(python, "-c", CHILD, check=True).stdout == f"{python}\n"
    if not earlier:
        assert python.startswith(f"{checkout.root}/.venv.d/")
        assert contents(Path(python).parents[1]) == before
    assert checkout.run("once")[2] == ""  # nothing is removed under the running miner
    assert miner.poll() is None
    miner.terminate()
    miner.communicate(timeout=HANG)
    status, _, err = checkout.run("once")
    assert status == 0
    assert err.count("which no process uses") == 1
    assert [*(checkout.root / ".venv.d").iterdir()] == [link.resolve()]


def test_a_temporarily_missing_driver_keeps_the_cuda_build(checkout: Checkout) -> None:
    _, _, err = checkout.run()
    assert "build=cuda\n" in checkout.stamp()
    assert "no NVIDIA GPU" not in err
    checkout.tool("nvidia-smi", "exit 9")
    assert checkout.run()[0] == 0
    assert checkout.builds() == 1


@pytest.mark.parametrize(
    ("script", "reason", "package"),
    [
        ("exit 1", "Python 3.10 to 3.13 was not found", "python3 python3-venv"),
        (
            f'case "$2" in *ensurepip*) exit 1;; esac\nexec "{sys.executable}" "$@"',
            "has no venv module",
            f"python3.{sys.version_info.minor}-venv",
        ),
    ],
    ids=["no Python", "no module venv"],
)
def test_a_missing_python_or_venv_is_reported_with_its_package(checkout, script, reason, package):
    for name in ("python3", *(f"python3.{minor}" for minor in range(8, 16))):
        checkout.tool(name, script)
    status, _, err = checkout.run(PYTHON="")
    assert status == EX_CONFIG
    assert reason in err
    assert f"apt install {package}" in err
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo 3.14", "is Python 3.14"), ("echo 3.9", "is Python 3.9"), ("exit 1", "does not run")],
)
def test_an_unsuitable_named_python_is_rejected(checkout, script, reason):
    checkout.tool("mine", script)
    status, _, err = checkout.run(PYTHON="mine")
    assert status == EX_CONFIG
    assert f"PYTHON=mine {reason}: name one of Python 3.10 to 3.13" in err
    assert not (checkout.root / ".venv").exists()


def test_a_named_python_must_match_the_installed_one(installed: Checkout) -> None:
    before = installed.builds()
    other = 'case "$2" in *version_info*) echo 3.99; exit;; esac'
    installed.tool("other", other.replace("3.99", "3.10" if sys.version_info[1] > 10 else "3.11"))
    status, _, err = installed.run(PYTHON="other")
    assert status == EX_CONFIG
    assert "PYTHON=other is Python 3.1" in err
    assert f".venv holds 3.{sys.version_info.minor}" in err
    assert installed.builds() == before


@pytest.mark.parametrize("venv", ["none", "moved", "unusable"])
def test_a_read_only_checkout_is_not_changed(venv: str) -> None:
    # pytest's own folders are closed to others
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        checkout = Checkout(Path(name))
        checkout.user = NOBODY if os.geteuid() == 0 else None
        if venv != "none":
            (checkout.root / ".venv/bin").mkdir(parents=True)
            root = checkout.root if venv == "unusable" else "/elsewhere"
            (checkout.root / ".venv/quasar-install").write_text(f"root={root}\nbuild=cpu\n")
            python = "/bin/true" if venv == "moved" else checkout.root / "backend.py"
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
        if venv == "unusable":
            status, out, err = checkout.run("status")
            assert (status, out) == (EX_CONFIG, "")
            assert err.startswith(f"this user may not execute {checkout.root}/.venv/bin/python:")


def test_another_programs_virtual_environment_is_not_changed(checkout: Checkout) -> None:
    kept = checkout.root / ".venv/mine.txt"
    kept.parent.mkdir()
    kept.touch()
    status, _, err = checkout.run()
    assert status == EX_CONFIG
    assert "was not made by this script" in err
    assert kept.exists()


def test_an_unreachable_index_is_a_temporary_failure(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, dependencies='"idna"')
    offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    status, _, err = checkout.run(PIP_NO_INDEX="0", **offline)
    assert status == 1
    assert "index could not be reached" in err


(LOCKED,) = re.findall(r"^torch==(\S+)", (PROJECT / "requirements/lock.txt").read_text(), re.M)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def make_index(folder: Path, *versions: str, needs: str = "") -> Path:
    """Make a package index with wheels of PyTorch, each of which requires `needs`."""
    (folder / "torch").mkdir(parents=True)
    for version in versions:
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(folder / f"torch/torch-{version}-py3-none-any.whl", "w") as wheel:
            facts = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
            wheel.writestr(
                f"{info}/METADATA", facts + (f"Requires-Dist: {needs}\n" if needs else "")
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    names = [path.name for path in sorted((folder / "torch").iterdir())]
    links = "".join(f'<a href="{name}">{name}</a>' for name in names)
    page = f"<!DOCTYPE html><html><body>{links}</body></html>"
    (folder / "torch/index.html").write_text(page)
    return folder


def torch_in(checkout: Checkout) -> list[str]:
    paths = (checkout.root / ".venv").glob("lib/*/site-packages/torch-*.dist-info")
    return [path.name.removeprefix("torch-").removesuffix(".dist-info") for path in paths]


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder by HTTP on loopback; yield its address and the list of requested paths."""
    requests: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            requests.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}", requests


@pytest.fixture
def needing_torch(tmp_path: Path) -> Checkout:
    """A checkout that depends on PyTorch, on a machine without a GPU."""
    checkout = Checkout(tmp_path, dependencies='"torch>=2.7"')
    checkout.tool("nvidia-smi", "exit 9")
    return checkout


def set_cpu_index(checkout: Checkout, address: str) -> None:
    """Replace the address of PyTorch's CPU index, which tests cannot reach."""
    script = checkout.root / "scripts/install.sh"
    text = script.read_text()
    assert text.count(f"cpu_index={CPU_INDEX}\n") == 1
    script.write_text(text.replace(CPU_INDEX, address))


def test_the_named_index_is_used_for_the_locked_pytorch(needing_torch, tmp_path):
    url = make_index(tmp_path / "index", LOCKED, f"{LOCKED}+cpu", "99.0").as_uri()
    # with a named index, PyTorch's own gets no request
    with served(make_index(tmp_path / "own", f"{LOCKED}+cpu")) as (address, requests):
        set_cpu_index(needing_torch, address)
        env = {"TORCH_INDEX_URL": url, "PIP_NO_INDEX": "0", "PIP_INDEX_URL": url}
        status, _, err = needing_torch.run(**env)
        assert status == 0, err
        assert torch_in(needing_torch) == [f"{LOCKED}+cpu"]
        assert requests == []


def test_without_a_gpu_pytorchs_cpu_index_is_used(needing_torch, tmp_path):
    cuda = make_index(tmp_path / "index", LOCKED, needs="nvidia-cublas").as_uri()
    with served(make_index(tmp_path / "own", f"{LOCKED}+cpu")) as (address, requests):
        set_cpu_index(needing_torch, address)
        status, _, err = needing_torch.run(PIP_NO_INDEX="0", PIP_INDEX_URL=cuda)
        assert status == 0, err
        assert torch_in(needing_torch) == [f"{LOCKED}+cpu"]
        assert f"PyTorch's CPU build is taken from {address}" in err
        # an update keeps it and sends no request
        requests.clear()
        needing_torch.change_dependencies()
        status, _, err = needing_torch.run(PIP_NO_INDEX="0", PIP_INDEX_URL=cuda)
        assert (status, requests) == (0, []), err
        assert needing_torch.builds() == 2


def test_a_silent_cpu_index_is_replaced_by_pips_index(needing_torch, tmp_path):
    url = make_index(tmp_path / "index", LOCKED).as_uri()
    with socket.create_server(("127.0.0.1", 0)) as place:  # it never replies
        address = f"http://127.0.0.1:{place.getsockname()[1]}"
        set_cpu_index(needing_torch, address)
        script = needing_torch.root / "scripts/install.sh"
        script.write_text(script.read_text().replace("timeout 5 ", "timeout 0.5 "))
        # pip itself would wait for 15 s, six times
        status, _, err = needing_torch.run(PIP_NO_INDEX="0", PIP_INDEX_URL=url)
    assert status == 0, err
    assert torch_in(needing_torch) == [LOCKED]
    lines = [line for line in err.splitlines() if address in line]
    assert lines == [
        f"install: no NVIDIA GPU, and {address} cannot be reached: "
        "PyTorch is taken from pip's index (set TORCH_INDEX_URL for another)"
    ]
    assert "WARNING: Retrying" not in (needing_torch.root / ".venv/quasar-install.log").read_text()


def test_with_a_gpu_the_cpu_index_is_not_used(needing_torch: Checkout, tmp_path: Path) -> None:
    url = make_index(tmp_path / "index", LOCKED).as_uri()
    needing_torch.tool("nvidia-smi", "echo GPU 0")
    with served(make_index(tmp_path / "own", f"{LOCKED}+cpu")) as (address, requests):
        set_cpu_index(needing_torch, address)
        status, _, err = needing_torch.run(PIP_NO_INDEX="0", PIP_INDEX_URL=url)
        assert status == 0, err
        assert (torch_in(needing_torch), requests) == ([LOCKED], [])


def show_free(checkout: Checkout, gigabytes: int) -> None:
    line = f"/dev/x 99 9 {gigabytes * 2**20} 1% /"
    checkout.tool("df", f"echo 'Filesystem Blocks Used Free'; echo '{line}'")


def test_the_disk_is_checked_for_the_build_that_will_be_installed(needing_torch, tmp_path):
    cuda = make_index(tmp_path / "cuda", LOCKED, needs="nvidia-cublas").as_uri()
    cpu = make_index(tmp_path / "cpu", LOCKED).as_uri()
    show_free(needing_torch, 6)
    set_cpu_index(needing_torch, f"http://127.0.0.1:{free_port()}")
    # the fallback has a CUDA build, which needs more than the free space
    status, _, err = needing_torch.run(PIP_NO_INDEX="0", PIP_INDEX_URL=cuda)
    assert status == EX_CONFIG
    assert "6 GB free" in err
    assert "the CUDA build of PyTorch, which this package index has, needs about 12 GB" in err
    assert torch_in(needing_torch) == []
    status, _, err = needing_torch.run(PIP_NO_INDEX="0", PIP_INDEX_URL=cpu)
    assert status == 0, err
    # an update needs little additional space
    show_free(needing_torch, 1)
    needing_torch.change_dependencies()
    assert needing_torch.run(PIP_NO_INDEX="0", PIP_INDEX_URL=cpu)[0] == 0
    refused = needing_torch.install("dev", PYTHON="")
    assert refused.returncode == EX_CONFIG
    assert "the cpu installation with dev,miner needs about 2 GB" in refused.stderr


@pytest.mark.parametrize(
    ("gpu", "extra", "need"), [(False, "miner", 3), (False, "dev", 4), (True, "miner", 12)]
)
def test_a_new_installation_requires_space_for_its_build_and_extras(checkout, gpu, extra, need):
    show_free(checkout, need - 1)
    checkout.tool("nvidia-smi", "echo GPU 0" if gpu else "exit 9")
    refused = checkout.install(extra)
    assert refused.returncode == EX_CONFIG
    assert f"disk: {need - 1} GB free" in refused.stderr
    assert f"needs about {need} GB" in refused.stderr
    assert not (checkout.root / ".venv").exists()


def test_neurons_can_be_imported_from_any_folder(installed: Checkout) -> None:
    python = installed.root / ".venv/bin/python"
    code = "import neurons; print(list(neurons.__path__)[0])"
    assert installed.run()[0] == 0
    done = run(python, "-I", "-c", code, cwd="/")
    assert done.stdout.strip() == str(installed.root / "neurons"), done.stderr
