#!/usr/bin/env bash
# Runs every check of the project: scripts/test.sh [--quick] [PATH...] [PYTEST ARGUMENT...]
#
# All stages run in order, so that one run shows every failure. pytest comes last; the kernels compile meanwhile,
# because some tests sleep. The output ends with pytest's summary and the names of failed stages. The exit status is
# pytest's, or 1 if only another stage failed.
#
# Arguments go to pytest. If one of them is a PATH below tests/, only format and lint run before the tests,
# and the compilations if PATH is tests/quasar_kernels or below it. --quick runs only format, lint, the
# contracts of imports and the files of tests/quick.txt, in which no test starts a process.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
scripts/install.sh dev
export PATH="$PWD/.venv/bin:$PATH"

status=0
failed=()
stage() {
  local name=$1 since=$SECONDS
  shift
  printf '== %s\n' "$name"
  if "$@"; then
    printf '   %s: passed in %d s\n' "$name" $((SECONDS - since))
  else
    printf '   %s: FAILED\n' "$name"
    failed+=("$name")
    status=1
  fi
}

# shellcheck disable=SC2329 # stage calls it
check_cuda_format() {
  git ls-files -z '*.cu' '*.cuh' | xargs -0 clang-format --dry-run --Werror
}

# shellcheck disable=SC2329 # stage calls it
scan_secrets() {
  git ls-files -z | xargs -0 detect-secrets-hook --no-verify --baseline .secrets.baseline || {
    echo 'Not a secret? Look twice, then run "make baseline" and commit .secrets.baseline.'
    return 1
  }
}

# shellcheck disable=SC2329 # stage calls it
finish_types() {
  wait "$types"
}

scope=all
workers=3 # one more than two cores, because some tests sleep
for argument in "$@"; do
  case ${argument#./} in
    --quick)
      scope=quick workers=2 # these tests do not sleep
      mapfile -t quick <tests/quick.txt
      set -- -m 'not slow and not gpu' "${quick[@]}" "$@"
      ;;
    tests/quasar_kernels*) scope=kernels ;;
    tests/?*) [ "$scope" != all ] || scope=part ;;
  esac
  case $argument in *.py | *.py::*) workers=0 ;; esac
done

if [ "$scope" = all ]; then
  mypy & # the stages before the compilations leave a core idle
  types=$!
fi
stage format ruff format --check .
stage "format of CUDA" check_cuda_format
stage lint ruff check .
case $scope in all | quick) stage imports lint-imports ;; esac
if [ "$scope" = all ]; then
  stage shell shellcheck START_*.sh scripts/*.sh .ci/run
  stage secrets scan_secrets
fi
case $scope in all | kernels)
  # `make kernels` compiles everything
  echo '== kernels (compile during the tests; their output follows if they fail)'
  compilations=$(mktemp)
  setsid python -m benchmarks.resources.compile --check --quick >"$compilations" 2>&1 &
  kernels=$!
  trap 'rm "$compilations"; kill -- "-$kernels" 2>/dev/null || true' EXIT # also on Ctrl-C
  ;;
esac
[ "$scope" != all ] || stage types finish_types
printf '== tests\n'
# A file's tests run in one process, because they share fixtures.
python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@" || status=$?
if [ -n "${kernels-}" ] && ! wait "$kernels"; then
  cat "$compilations"
  stage kernels false
fi
[ ${#failed[@]} = 0 ] || echo "failed stages: ${failed[*]}"
exit "$status"
