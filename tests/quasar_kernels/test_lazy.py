"""The packages for model builders: lazy imports, and their names."""

import importlib

import pytest

from tests.processes import run_python

PACKAGES = ["quasar_kernels.blocks", "quasar_kernels.delta_rule"]


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_imports_neither_torch_nor_fla(package):
    heavy = "{'torch', 'triton', 'fla', 'transformers', 'numpy'}"
    done = run_python("-c", f"import sys, {package}; print({heavy} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_exists_and_is_listed(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        getattr(module, name)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'absent'"):
        _ = module.absent
