"""A small checkout to install and to start: no dependencies, and a fake miner."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import PROJECT
from tests.processes import HANG, put_program, run

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "quasar-kernels"
version = "0.1"
dependencies = [DEPENDENCIES]

[project.optional-dependencies]
dev = []
metrics = []
miner = []
server = []
"""

BACKEND = '''\
"""A build backend that needs no package index; each build adds a line to builds.txt."""

import pathlib, time, zipfile


def build_editable(folder, settings=None, metadata=None):
    with open("builds.txt", "a") as builds:
        builds.write("build\\n")
    while pathlib.Path("hang").exists():
        time.sleep(0.05)
    info = "quasar_kernels-0.1.dist-info"
    facts = "Metadata-Version: 2.1\\nName: quasar-kernels\\nVersion: 0.1\\n"
    facts += "".join(f"Provides-Extra: {name}\\n" for name in ("dev", "metrics", "miner", "server"))
    facts += "".join(f"Requires-Dist: {name}\\n" for name in [DEPENDENCIES])
    with zipfile.ZipFile(f"{folder}/quasar_kernels-0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("quasar_kernels.pth", str(pathlib.Path.cwd()))
        wheel.writestr(f"{info}/METADATA", facts)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return "quasar_kernels-0.1-py3-none-any.whl"
'''

MINER = """\
import json, mmap, os, signal, sys, time

with open(sys.prefix + "/pyvenv.cfg", "rb") as file:  # real processes map compiled modules
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(json.dumps([os.getpid(), os.getcwd(), sys.argv[1:], os.environ.get("PLANTED")]), flush=True)
while "WAIT" in os.environ:
    time.sleep(0.05)
"""


class Checkout:
    """A checkout in a folder with a space in its name, with a fake miner."""

    python = sys.executable  # the interpreter for its scripts
    user: int | None = None  # the user who runs them; None for this one

    def __init__(self, home: Path, dependencies: str = "") -> None:
        self.root = home / "quasar miner"
        self.tools = home / "tools"
        for folder in ("scripts/help", "requirements", "neurons/miner", "quasar_kernels"):
            (self.root / folder).mkdir(parents=True)
        self.tools.mkdir()
        for name in (
            *("START_MINER.sh", "scripts/install.sh", "scripts/before_install.sh"),
            *("scripts/help/miner.txt", "requirements/lock.txt", "quasar_kernels/__init__.py"),
        ):
            shutil.copy(PROJECT / name, self.root / name)
        for name, text in (("pyproject.toml", PYPROJECT), ("backend.py", BACKEND)):
            (self.root / name).write_text(text.replace("DEPENDENCIES", dependencies))
        (self.root / "neurons/miner/__main__.py").write_text(MINER)
        # with a GPU, the script neither looks for PyTorch's CPU index nor asks pip for its builds
        self.tool("nvidia-smi", "echo GPU 0")
        self.tool("df", "echo Filesystem; echo disk 1 1 99999999")
        self.home = home

    def tool(self, name: str, script: str) -> None:
        """Make a command that comes first on the PATH of this checkout's processes."""
        put_program(self.tools / name, script)

    def environment(self, **more: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
        env |= {"PATH": f"{self.tools}:{env['PATH']}", "PIP_NO_INDEX": "1"}
        return env | {"PIP_CONFIG_FILE": os.devnull, "PYTHON": self.python} | more

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start the miner from another folder, in a new process group."""
        return subprocess.Popen(
            [str(self.root / "START_MINER.sh"), *arguments],
            cwd=self.home,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            user=self.user,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Start, wait, and return exit status, standard output and standard error."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=HANG)
        return process.returncode, out, err

    def install(self, *extras: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PATH": f"{self.tools}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
        env |= {"PYTHON": self.python} | environment
        return run(self.root / "scripts/install.sh", *extras, env=env)

    def change_dependencies(self) -> None:
        """Make the present installation out of date."""
        with (self.root / "pyproject.toml").open("a") as pyproject:
            pyproject.write("# changed\n")

    def builds(self) -> int:
        path = self.root / "builds.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def stamp(self) -> str:
        return (self.root / ".venv/quasar-install").read_text()
