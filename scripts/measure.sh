#!/usr/bin/env bash
# Tests and measures on this GPU everything that the documents show: scripts/measure.sh FORK [FOLDER]
#
# FORK is a checkout of the public fork, FOLDER takes the data (default: benchmarks/h200). It took
# 22 minutes on an H200 before honesty.acceptance and the .speed of delta_rule, wkv6 and mechanisms
# were among its steps. COMMIT names what is measured where git cannot tell. All steps run, so that one failure
# costs its own figures alone; it decides the exit status.
set -uo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." || exit
case ${1:-} in
  '' | -*)
    echo 'usage: scripts/measure.sh FORK [FOLDER]' >&2
    exit 2
    ;;
esac
fork=$1
out=${2:-benchmarks/h200}
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null)}
[ -d "$fork/fla" ] || {
  echo "$fork has no folder fla: clone https://github.com/troy12x/flash-linear-attention there" >&2
  exit 2
}
mkdir -p "$out"
# A GPU machine may bring its own PyTorch, and so have no .venv.
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

status=0
step() {
  local since=$SECONDS name=$1
  shift
  printf '== %s\n' "$name"
  "$python" -m "benchmarks.$name" "$@" --commit "$commit" || status=1
  printf '   %d s\n' $((SECONDS - since))
}

step gpu_tests.run --out "$out/gpu-tests.json"
# the layer next: what a machine has time for is what counts most
step layer.speed --fork "$fork" --out "$out"
step layer.training --fork "$fork" --out "$out/layer-training.json"
step honesty.acceptance --fork "$fork" --out "$out/acceptance.json"
step operator.inference --out "$out/operator.json"
step operator.training --out "$out/operator_training.json"
step delta_rule.speed --out "$out/delta-rule.json"
step wkv6.speed --out "$out/wkv6.json"
step mechanisms.speed --out "$out/mechanisms.json"
step recall.train --out "$out/recall.json"
step nsight.profile --out "$out/profile.json"
step sanitizer.watch --out "$out/sanitizer.json"
echo 'Now: python -m benchmarks.report'
exit "$status"
