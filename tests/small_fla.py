"""A small fla for tests that start many workers, each of which imports it.

`fla.ops` and `fla.layers` import none of their modules by themselves, in particular not
transformers, and `torch.compiler.disable` does not load torch's compiler. These imports would take
more than half of a worker's time on a CPU. The layer and the operator find all modules that they
import. `neurons/embedded/test_upstream.py` uses the whole fla.
"""

from importlib.metadata import distribution
from pathlib import Path

from quasar_kernels.fla_package import PACKAGE

OPS = Path("fla/ops/__init__.py")
LAYERS = Path("fla/layers/__init__.py")
_DISABLE = "import torch\n\ntorch.compiler.disable = lambda function: function\n"


def shrink(tree: Path) -> None:
    """Replace the imports of `fla.ops` and `fla.layers` in a tree."""
    for name, text in ((OPS, _DISABLE), (LAYERS, "")):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).unlink(missing_ok=True)  # it may be a link to the installed file
        (tree / name).write_text(text)


def install_small_fla(folder: Path) -> str:
    """Install the small fla in `folder` as links to the installed fla; return it for PYTHONPATH.

    A process with this path finds this distribution of fla-core first.
    """
    real = distribution(PACKAGE)
    information = folder / f"fla_core-{real.version}.dist-info"
    information.mkdir(parents=True)
    names = [file for file in real.files or () if file.parts[0] == "fla" and file.suffix == ".py"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(Path(str(real.locate_file(name))).resolve())
    shrink(folder)
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {real.version}\n"
    )
    (information / "RECORD").write_text("".join(f"{name},,\n" for name in (*names, LAYERS)))
    return str(folder)
