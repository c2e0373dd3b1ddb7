"""No kernel is tuned at run time, neither this project's nor fla's."""

import ast

from quasar_kernels.blocks.ssd import OPERATOR as SSD
from quasar_kernels.blocks.wkv6 import OPERATOR as WKV6
from quasar_kernels.contract import OVERLAY
from tests import PROJECT

NOT_TUNED = ("fla.utils", "fla.ops.utils.index", "fla.backends", "fla.ops.quasar", "fla.layers")
"""Modules of fla whose kernels this project's calls may reach: the first three have none."""
ON_REQUEST = {
    "delta_rule/host.py": {"fla.ops.delta_rule", "fla.ops.gated_delta_rule"},  # `switched`
    "blocks/ssd.py": {"fla.ops.simple_gla"},
    "blocks/wkv6.py": {"fla.ops.rwkv6"},
}
"""Files that call fla's kernels for users who ask for them."""


def test_only_requests_reach_kernels_that_fla_tunes():
    package, found = PROJECT / "quasar_kernels", {}
    for path in package.rglob("*.py"):
        text = path.read_text()
        assert "autotune(" not in text, path
        for node in ast.walk(ast.parse(text)):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.startswith("fla.") and not name.startswith(NOT_TUNED):
                    found.setdefault(str(path.relative_to(package)), set()).add(name)
    assert found == ON_REQUEST
    assert OVERLAY.is_relative_to(package)
    for operator in (SSD, WKV6):
        assert operator.named("fla-core").tuned
    assert SSD.named("mamba_ssm").tuned
