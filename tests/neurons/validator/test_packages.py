"""A worker in the real sandbox finds packages in every place from which Python imports them."""

import json
import os
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from quasar_kernels.contract import fork_imports
from tests import PROJECT
from tests.processes import run

pytestmark = pytest.mark.usefixtures("sandbox")

INSTALLED = sysconfig.get_path("purelib")
"""Where this test's own Python has its packages."""
REAL = (
    *("annotated_types", "dotenv", "idna", "pydantic", "pydantic_core"),
    *("typing_extensions.py", "typing_inspection"),
)
"""Packages whose code runs in these tests."""

TRY = """
import json, subprocess, sys
from pathlib import Path
from neurons.runtime.errors import ConfigError
from neurons.validator.packages import check_imports
from neurons.validator.sandbox import open_sandbox

private, scratch, *secrets = map(Path, sys.argv[1:])
sandbox = open_sandbox(private=[private])
problem = ""
try:
    check_imports(sandbox, sandbox.packages.withheld)
except ConfigError as error:
    problem = str(error)
seen = {}
for secret in secrets:
    argv = sandbox.command(["/bin/cat", str(secret)], {}, scratch, [])
    seen[secret.name] = subprocess.run(argv, capture_output=True).returncode == 0
print(json.dumps([problem, seen]))
"""


class Home:
    """A user with a home folder, wallets, settings and a Python installation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home, self.state = folder / "home/user", folder / "state"
        self.secret = self.home / ".bittensor/wallets/default"
        self.settings = self.home / ".env"
        for file in (self.secret, self.settings, self.state / "journal"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("canary")
        venv.create(folder / "python", symlinks=True, with_pip=False)
        self.python = folder / "python/bin/python"
        self.env = {"PATH": os.environ["PATH"], "HOME": str(self.home)}

    @property
    def site(self) -> Path:
        (found,) = (self.folder / "python").glob("lib/python*/site-packages")
        return found

    def use_base_python(self) -> None:
        """Use the Python below the virtual environment, which has a user site."""
        self.python = Path(sys._base_executable)  # type: ignore[attr-defined]

    def start(self, *secrets: Path) -> tuple[str, dict[str, bool]]:
        """Return why workers cannot import in the sandbox, or "", and which secrets they read."""
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        own = [self.secret, self.settings, self.state / "journal", PROJECT / "pyproject.toml"]
        words = [str(one) for one in (self.state, scratch, *own, *secrets)]
        env = {**self.env, "PYTHONPATH": f"{PROJECT}:{self.env.get('PYTHONPATH', '')}"}
        done = run(self.python, "-c", TRY, *words, env=env, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        problem, seen = json.loads(done.stdout)
        return problem, seen

    def check_works(self, *secrets: Path, shown: Path | None = None) -> None:
        """Check that workers import all they need, and read `shown` but no secret."""
        problem, seen = self.start(*secrets, *([shown] if shown else []))
        assert problem == ""
        assert shown is None or seen.pop(shown.name)
        assert not any(seen.values()), seen


@pytest.fixture
def user(tmp_path: Path) -> Home:
    tmp_path.chmod(0o755)
    return Home(tmp_path)


def put_packages(folder: Path) -> Path:
    """Put the packages of the validator and its workers into a folder; return it.

    Most are empty, because each test would compile the real torch: workers write no byte code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in REAL:
        source = Path(INSTALLED, name)
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, folder / name)
    for name in {module.partition(".")[0] for module in fork_imports()} | {"fla"}:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    return folder


def test_packages_in_a_virtual_environment_under_tmp(user: Home) -> None:
    put_packages(user.site)
    user.check_works(shown=user.site / "torch/__init__.py")
    shutil.rmtree(user.site / "einops")
    problem, _ = user.start()
    assert problem == "Workers cannot import einops (not found). Run scripts/install.sh."


def test_packages_in_the_user_site(user: Home) -> None:
    user.use_base_python()
    place = user.home / f".local/lib/python{sysconfig.get_python_version()}/site-packages"
    put_packages(place)
    notes = user.home / ".local/notes"
    notes.write_text("canary")
    user.check_works(notes, shown=place / "torch/__init__.py")


def test_packages_in_the_target_of_a_pth_file(user: Home) -> None:
    put_packages(user.home / "wheels/store")
    (user.home / "linked").symlink_to("wheels/store")
    (user.site / "more.pth").write_text(f"{user.home}/linked\n")
    hidden = user.home / "wheels/store/.netrc"
    hidden.write_text("canary")
    user.check_works(hidden)


def test_packages_in_the_home_folder_itself_are_withheld(user: Home) -> None:
    put_packages(user.home)
    (user.site / "home.pth").write_text(f"{user.home}\n")
    problem, seen = user.start()
    assert "Workers in the sandbox cannot import the harness" in problem
    assert "No module named 'pydantic'" in problem
    assert f"{user.home} is on Python's path" in problem
    assert "it contains this user's files. Move the packages" in problem
    assert not any(seen.values()), seen


def test_packages_next_to_the_state_are_withheld(user: Home) -> None:
    user.env["PYTHONPATH"] = str(put_packages(user.folder / "all"))
    user.state = user.folder / "all/state"
    user.state.mkdir()
    (user.state / "journal").write_text("canary")
    problem, seen = user.start()
    assert f"{user.folder / 'all'} is on Python's path" in problem
    assert not any(seen.values()), seen
