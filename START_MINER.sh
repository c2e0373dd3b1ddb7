#!/usr/bin/env bash
# Starts the miner: makes or updates .venv, then becomes the Python process, so that signals reach it.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
case ${_START_MINER_SH_COMPLETE:-${1:-}} in # who only looks does not wait for an installation
  status | help | completion | --version | --help | -h | *_complete)
    [ -x .venv/bin/python ] || {
      [ ! -L .venv/bin/python ] || {
        echo "this user may not execute $PWD/.venv/bin/python: ask as the one that installed it," \
          "or remove .venv, and ./START_MINER.sh once installs it anew" >&2
        exit 78
      }
      echo "nothing is installed in $PWD yet: ./START_MINER.sh once installs it and runs one cycle"
      exit 0
    }
    ;;
  *) scripts/install.sh miner ;;
esac
exec .venv/bin/python -m neurons.miner "$@"
