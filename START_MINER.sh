#!/usr/bin/env bash
# Starts the miner: makes or updates .venv, then becomes the Python process, so that signals reach it.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
if [ -z "${_START_MINER_SH_COMPLETE:-}" ]; then . scripts/before_install.sh miner "$@"; fi
case ${_START_MINER_SH_COMPLETE:-${command:-}} in # commands that only read do not install anything
  status | help | completion | version | logs | *_complete)
    if [ -L .venv/bin/python ] && [ ! -x .venv/bin/python ]; then
      echo "this user may not execute $PWD/.venv/bin/python: run this as the user that installed it," \
        "or remove .venv, and ./START_MINER.sh once installs it again" >&2
      exit 78
    elif [ ! -x .venv/bin/python ]; then
      case ${command:-} in
        version) show_version && exit ;;
        help) cat scripts/help/miner.txt && echo ;;
        completion) exec >&2 ;; # stdout may be redirected to ~/.bashrc
      esac
      echo "nothing is installed in $PWD yet: ./START_MINER.sh once installs it and runs one cycle"
      if [ "${command:-}" = completion ]; then exit 78; fi
      exit 0
    fi
    ;;
  *) scripts/install.sh miner ;;
esac
exec "$(readlink -f .venv)/bin/python" -m neurons.miner "$@" # a later installation moves the link
