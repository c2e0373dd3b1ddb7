"""The host library for tests of whole processes, which start a dozen workers that each import it.

Its `fla.ops` imports none of its other operators by itself, which takes more than half of what
such a worker does on a CPU, what hides a function from torch's compiler does not load that, and
its `fla.layers` does not import what the public fork does, which is transformers above all.
What the layer and the operator import is there. `neurons/embedded/test_upstream.py` and
`quasar_kernels/test_mount.py` have the host as it is installed.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from quasar_kernels.fla_package import PACKAGE

EAGER = Path("fla/ops/__init__.py")
LAYERS = Path("fla/layers/__init__.py")
_INSTEAD = "import torch\n\ntorch.compiler.disable = lambda function: function\n"


def make_small(source: Path) -> None:
    """Let `fla.ops` and `fla.layers` in a host's source import nothing by themselves."""
    (source / EAGER).write_text(_INSTEAD)
    (source / LAYERS).write_text("")


def install_small_fla(folder: Path) -> str:
    """Install the host in `folder` as links to the real one; return it for PYTHONPATH.

    A process with this path finds the distribution there first, and makes its upstream of it.
    """
    real = distribution(PACKAGE)
    information = folder / f"fla_core-{real.version}.dist-info"
    information.mkdir(parents=True)
    names = [file for file in real.files or () if file.parts[0] == "fla" and file.suffix == ".py"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(Path(str(real.locate_file(name))).resolve())
    (folder / EAGER).unlink()
    (folder / EAGER).write_text(_INSTEAD)
    (folder / LAYERS).parent.mkdir(exist_ok=True)
    (folder / LAYERS).write_text("")
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {real.version}\n"
    )
    (information / "RECORD").write_text("".join(f"{name},,\n" for name in (*names, LAYERS)))
    return str(folder)
