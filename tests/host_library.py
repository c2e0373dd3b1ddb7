"""Run flash-linear-attention's tests of the delta rules, from a checkout, on these kernels.

    python -m tests.host_library CHECKOUT [PYTEST ARGUMENT ...]

These kernels replace fla's four functions; the tests compare them with fla's references in torch.
On a machine without a GPU, the torch path is tested. Tests of fla's own kernels, gates and other
backends are skipped.
"""

import sys
from pathlib import Path

import pytest

FILES = ("tests/ops/test_delta.py", "tests/ops/test_gdn.py")
SKIPPED = ("test_flash_qla", "test_gate[", "test_prepare_wy", "test_chunk_gated_delta_rule_fwd_h")
"""The first characters of the names of skipped tests."""


class Skip:
    """A pytest plugin that removes the tests of `SKIPPED`."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not item.name.startswith(SKIPPED)]


def main(arguments: list[str]) -> int:
    """Replace the functions, run pytest and return its exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 2
    checkout, *options = arguments
    files = [Path(checkout, name) for name in FILES]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        print(f"no such file: {', '.join(missing)}; give a checkout", file=sys.stderr)  # noqa: T201
        return 2
    import fla.utils
    import torch

    from quasar_kernels.delta_rule.host import switched

    if not torch.cuda.is_available():
        fla.utils.device = "cpu"  # type: ignore[attr-defined] # where tests put their tensors
        fla.utils.device_torch_lib = torch.cpu  # type: ignore[attr-defined] # synchronises them
    ours = ["-c", "/dev/null", "-p", "no:cacheprovider", "-q", *options]
    with switched():
        return pytest.main([*map(str, files), *ours], plugins=[Skip()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
