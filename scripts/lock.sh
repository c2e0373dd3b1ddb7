#!/usr/bin/env bash
# Writes requirements/lock.txt from pyproject.toml: scripts/lock.sh [--upgrade | --upgrade-package NAME]
#
# Pinned versions stay if pyproject.toml still allows them; the options take the newest ones instead. One
# file serves CPU and CUDA builds and every Python that pyproject.toml names: constraints on packages that
# a build does not use have no effect. It has no hashes, since PyTorch's builds for CPUs and for CUDA
# share one version but have different hashes. uv resolves without downloading wheels; pip installs, and
# uses a CPU build if an index or a folder of wheels has one.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."

[ -x .venv/bin/uv ] || {
  echo 'lock: .venv has no uv. Run scripts/install.sh dev, then this again.' >&2
  exit 1
}
# PyTorch's version is set by hand: it pins Triton, and benchmarks/kernel_resources.json has Triton's results.
exec .venv/bin/uv pip compile pyproject.toml --output-file requirements/lock.txt --quiet \
  --all-extras --universal --python-version 3.10 --constraint <(echo 'torch==2.13.0') \
  --annotation-style line --custom-compile-command scripts/lock.sh "$@"
