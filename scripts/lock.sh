#!/usr/bin/env bash
# Writes requirements/lock.txt from pyproject.toml: scripts/lock.sh [--upgrade | --upgrade-package NAME]
#
# What is pinned stays where pyproject.toml still allows it; the options take the newest instead. One
# file serves CPU and CUDA builds and every Python that pyproject.toml names: a constraint on a package
# that a build does not ask for does nothing. It has no hashes, since builds of PyTorch for CPUs and for
# CUDA share one version, and each index has its own. uv only resolves, which needs no download of
# wheels; pip installs, and takes a CPU build where an index or a folder of wheels offers one.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."

[ -x .venv/bin/uv ] || {
  echo 'lock: .venv has no uv. Run scripts/install.sh dev, then this again.' >&2
  exit 1
}
# PyTorch moves by hand: it pins Triton, and benchmarks/kernel_resources.json holds what that compiles.
exec .venv/bin/uv pip compile pyproject.toml --output-file requirements/lock.txt --quiet \
  --all-extras --universal --python-version 3.10 --constraint <(echo 'torch==2.13.0') \
  --annotation-style line --custom-compile-command scripts/lock.sh "$@"
