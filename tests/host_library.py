"""Run flash-linear-attention's own tests of the delta rules, from a checkout, on these kernels.

    python -m tests.host_library CHECKOUT [PYTEST ARGUMENT ...]

The four functions of the host that its tests import are ours then, the references that it computes
in torch stay its own. On a machine without a GPU it tests the torch path. Tests of the host's own
kernels, gates and other backends are left out: nothing of ours is in them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FILES = ("tests/ops/test_delta.py", "tests/ops/test_gdn.py")
NOT_OURS = ("test_flash_qla", "test_gate[", "test_prepare_wy", "test_chunk_gated_delta_rule_fwd_h")
"""How the names of tests begin that are left out."""


class LeaveOut:
    """A plugin of pytest that drops the tests of `NOT_OURS`."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the others."""
        items[:] = [item for item in items if not item.name.startswith(NOT_OURS)]


def main(arguments: list[str]) -> int:
    """Switch the functions over and run pytest; returns its exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)  # noqa: T201 a command talks to a person
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
        fla.utils.device_torch_lib = torch.cpu  # type: ignore[attr-defined] # what they wait for
    ours = ["-c", "/dev/null", "-p", "no:cacheprovider", "-q", *options]
    with switched():
        return pytest.main([*map(str, files), *ours], plugins=[LeaveOut()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
