#!/usr/bin/env bash
# Starts the inference server: makes or updates .venv, then becomes the Python process, so that signals reach it.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
. scripts/before_install.sh inference "$@"
scripts/install.sh inference
exec "$(readlink -f .venv)/bin/python" -m neurons.inference_server "$@" # a later installation moves the link
