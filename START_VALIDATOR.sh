#!/usr/bin/env bash
# Starts the validator: makes or updates .venv, then becomes the Python process, so that signals reach it.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
. scripts/before_install.sh validator "$@"
scripts/install.sh miner
exec "$(readlink -f .venv)/bin/python" -m neurons.validator "$@" # a later installation moves the link
