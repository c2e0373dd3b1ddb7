#!/usr/bin/env bash
# Repeats the GPU tests and most measurements of the documents on this GPU: scripts/measure.sh FORK [FOLDER]
#
# FORK is a checkout of the public fork. The data go to FOLDER (default: benchmarks/h200). The run takes hours,
# mostly for fla's kernels, of which Triton compiles and times many variants. Outside of a git repository, COMMIT
# names the measured commit. A failed step sets the exit status, but the others still run.
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
  echo "$fork lacks the folder fla: clone https://github.com/troy12x/flash-linear-attention to it" >&2
  exit 2
}
mkdir -p "$out"
# A GPU machine may have its own PyTorch and no .venv.
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

status=0
step() {
  local since=$SECONDS name=$1 file=$2
  shift 2
  printf '== %s\n' "$name, $file"
  "$python" -m benchmarks "$name" --out "$out/$file.json" "$@" --commit "$commit" || status=1
  printf '   %d s\n' $((SECONDS - since))
}

# without pyproject.toml's options, which require plugins that a GPU machine may lack
timeout 2h "$python" -m pytest tests/gpu -q -o addopts=--import-mode=importlib --junitxml "$out/gpu-tests.xml" || status=1
# The layer comes next, because its results matter most if there is not enough time for all.
step layer_accuracy layer-accuracy --fork "$fork"
step layer '{}' --fork "$fork" --tree public-fork baseline overlay-ops overlay overlay-portable
step layer_profile layer-profile-ops --fork "$fork" --tree overlay-ops
step layer_profile layer-profile --fork "$fork"
step layer_profile layer-profile-portable --fork "$fork" --tree overlay-portable
step layer_memory layer-memory --fork "$fork"
step layer_memory layer-memory-portable --fork "$fork" --tree overlay-portable
step layer_training layer-training --fork "$fork"
step adaptive_layer adaptive-layer
step claim_acceptance acceptance --fork "$fork"
step operator operator
step operator_training operator_training
step delta_rule delta-rule
step delta_rule_training delta-rule-training
step kda kda
step mechanisms mechanisms
echo 'Now: python -m benchmarks.report'
exit "$status"
