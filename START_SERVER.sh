#!/usr/bin/env bash
# Starts the validator API: makes or updates .venv, then becomes the Python process, so that signals reach it.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
. scripts/before_install.sh server "$@"
scripts/install.sh server
exec "$(readlink -f .venv)/bin/python" -m neurons.validator_api "$@" # a later installation moves the link
