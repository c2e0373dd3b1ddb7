#!/usr/bin/env bash
# Makes or updates .venv and installs the project into it: scripts/install.sh [EXTRA...]
#
# .venv is a link to a folder in .venv.d. An installation or update makes a new folder beside the present
# one and moves the link when it is complete. An interruption therefore changes nothing, and running
# processes keep the folder that they started from. It is removed once no process uses it.
#
# EXTRA is one of pyproject.toml's optional dependencies, or `all` for every one except dev; those of
# earlier calls stay installed. Without EXTRA, only the library is installed. requirements/lock.txt has
# the versions. If the stamp in .venv is up to date, the script does nothing. PYTHON names the
# interpreter to use, TORCH_INDEX_URL the package index for PyTorch. By default, a machine without an
# NVIDIA GPU uses PyTorch's CPU index if it can be reached; BUILD=cuda installs the build for a GPU, for
# example into a container's image. pip's configuration sets the rest.
# Exit status 78: the message names what you must change; 1: another attempt may succeed.
set -euo pipefail

cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
root=$PWD
stamp=.venv/quasar-install # the last file of an installation; a .venv without it is not from this script
folders=.venv.d
new='' # the folder that this run installs into, once it exists
log=/dev/null # pip's output, in that folder
cpu_index=https://download.pytorch.org/whl/cpu
cuda_gb=12 # disk for a CUDA build of PyTorch with NVIDIA's libraries during the installation
unset PYTHONPATH PYTHONHOME # another project's packages would leak into the new environment
umask 022                   # a validator of root runs forks as another user, who reads the packages

exec 3>&2 # for messages, also while a command's output goes to the log
say() { printf '%s\n' "install: $*" >&3; }
stop() { say "$@" && exit 78; }

recorded() { sed -n "s/^$1=//p" "$stamp" 2>/dev/null || true; }

# Prints the names of the optional dependencies.
known_extras() {
  sed -n '/^\[project.optional-dependencies\]/,/^\[/s/^\([a-z][a-z0-9-]*\) = .*/\1/p' pyproject.toml
}

# Stops if an argument is not an extra, before anything is written.
check_extras() {
  local name
  for name in "$@"; do
    [ "$name" != tuning ] || stop "the extra 'tuning' was removed in 0.3.0: python -m harness.tune needs none."
    known_extras | grep -qxF -e "$name" ||
      stop "there is no extra '$name': give some of $(known_extras | paste -sd ' '), or none."
  done
}

has_gpu() {
  compgen -G '/dev/nvidia[0-9]*' >/dev/null || nvidia-smi -L >/dev/null 2>&1
}

# Prints the stamp of a finished installation of the wanted extras and build.
wanted_stamp() {
  echo "root=$root" # files of a virtual environment contain this path
  echo "build=$build"
  echo "extras=$extras"
  echo "inputs=$(cat pyproject.toml requirements/*.txt | sha256sum | cut -c1-64)"
}

# Prints the interpreter to use: PYTHON, or the first suitable one. Without one, prints the reason.
find_python() {
  local names=(python3.11 python3.12 python3.13 python3.10 python3) name version without_venv=''
  [ -z "${PYTHON:-}" ] || names=("$PYTHON")
  for name in "${names[@]}"; do
    version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=''
    case $version in
      3.10 | 3.11 | 3.12 | 3.13) ;;
      *)
        [ -z "${PYTHON:-}" ] || stop "PYTHON=$PYTHON ${version:+is Python }${version:-does not run}:" \
          'name one of Python 3.10 to 3.13, or leave PYTHON unset.'
        continue
        ;;
    esac
    if "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      echo "$name"
      return
    fi
    without_venv=${without_venv:-$name}
  done
  if [ -n "$without_venv" ]; then
    stop "$without_venv has no venv module. On Debian and Ubuntu: sudo apt install $("$without_venv" -c \
      'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  fi
  stop 'Python 3.10 to 3.13 was not found (PYTHON=/path/to/python3.11 names one).' \
    'On Debian and Ubuntu: sudo apt install python3 python3-venv python3-dev'
}

# Stops if PYTHON is not suitable, or has another version than .venv.
check_python() {
  local wanted has
  wanted=$(find_python)
  wanted=$("$wanted" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  has=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 0
  [ "$wanted" = "$has" ] || stop "PYTHON=$PYTHON is Python $wanted, and .venv holds $has." \
    'Remove .venv to install again with it, or leave PYTHON unset.'
}

# Stops if this user cannot write everywhere, since the installation would be left incomplete.
check_writable() {
  local closed
  closed=$([ -w . ] || echo "$root")
  closed=${closed:-$(find "$root/.venv" -type d ! -writable -print -quit 2>/dev/null || true)}
  [ -z "$closed" ] || stop "$closed cannot be written, and .venv has to be installed or updated:" \
    'make it writable for this user (chown, chmod u+w), or clone to a folder of yours.'
}

# Replaces the old path of a moved checkout by the new one in the files of .venv.
adapt_to_move() {
  say "the checkout was moved from $(recorded root): adapting .venv"
  replace_path .venv "$(recorded root)" "$root"
}

# Replaces a path in an installation's files: replace_path FOLDER OLD NEW
replace_path() {
  "$1/bin/python" -I - "$@" <<'END'
import glob, os, re, shutil, sys
folder, old, new = sys.argv[1:]
site, stamp = f"{folder}/lib/python*/site-packages", f"{folder}/quasar-install"
names = (f"{folder}/bin/*", f"{folder}/pyvenv.cfg", f"{site}/*.pth", f"{site}/__editable__*.py", stamp)
names += (f"{site}/quasar_*-*.dist-info/direct_url.json",)
place = re.compile(re.escape(old.encode()) + rb"(?![\w.-])")
for path in sorted({path for name in names for path in glob.glob(name)}, key=lambda p: p == stamp):
    try:
        text = open(path, "rb").read()
    except OSError:
        continue
    if place.search(text) and b"\0" not in text:
        part = f"{path}.part"  # a new file: the old one may also belong to another installation
        open(part, "wb").write(place.sub(lambda _: new.encode(), text))
        shutil.copymode(path, part)
        os.replace(part, path)
END
}

# Prints the ids of the processes that use an installation: users_of FOLDER
users_of() {
  # shellcheck disable=SC2062 # the pattern comes from stdin: as an argument, it would match this grep
  { grep -lsF --file=- /proc/[0-9]*/cmdline /proc/[0-9]*/maps <<<"$root/$1/" || true; } |
    cut -d / -f 3 | sort -un | paste -sd ' '
}

# Lets all users read an installation that an earlier version of this script made under a strict umask.
let_all_read() {
  if [ -O .venv/ ] && [ -n "$(find .venv/ -maxdepth 0 ! -perm -005)" ]; then chmod -R a+rX .venv/; fi
}

# Takes the lock of this checkout's installations: miner, server and validator may start at once.
lock() {
  exec 9<scripts/install.sh
  if command -v flock >/dev/null; then flock "$@" 9; fi
}

# Removes the installations that are neither the present one nor used by a process.
remove_unused() {
  local folder
  for folder in "$folders"/*; do
    if [ ! -d "$folder" ] || [ "$folder" = "$(readlink .venv)" ] || [ -n "$(users_of "$folder")" ]; then
      continue
    elif [ -e "$folder/quasar-install" ]; then
      say "removing the earlier installation $folder, which no process uses"
    else
      say "removing $folder, an installation that was interrupted"
    fi
    watched rm -rf "$folder"
  done
}

# Makes the folder of the new installation. If pip can update the present one, the folder gets hard links
# to its files, which pip replaces and does not change. Otherwise it is an empty environment.
make_folder() {
  local number=1 present
  mkdir -p "$folders"
  until mkdir "$folders/$number" 2>/dev/null; do
    [ -e "$folders/$number" ] || stop "$root/$folders/$number cannot be made."
    number=$((number + 1))
  done
  new=$folders/$number
  log=$new/quasar-install.log
  if [ "$rebuild" = yes ]; then
    say "making $root/$new with $("$python" --version)"
    watched "$python" -m venv "$new" >"$log" 2>&1 || { cat "$log" >&2 && stop "$python -m venv failed"; }
  else
    say "updating a copy of .venv in $root/$new"
    present=$(readlink .venv || echo .venv)
    watched cp -a --link "$present/." "$new" 2>/dev/null || watched cp -a "$present/." "$new"
    replace_path "$new" "$root/$present" "$root/$new"
    rm -f "$new"/quasar-install*
  fi
}

# Links .venv to the new installation, in one step unless an earlier version made .venv a folder.
move_link() {
  local before users
  before=$(readlink .venv || true)
  ln -sfn "$new" "$folders/.link"
  if [ -z "$before" ] && [ -d .venv ]; then
    before=$folders/0
    mv -T .venv "$before"
  fi
  mv -T "$folders/.link" .venv
  users=$([ -z "$before" ] || users_of "$before")
  [ -z "$users" ] || say "restart the processes $users to use the new installation; they still use the earlier one"
}

# Whether an installation has PyTorch in the version of the lock, so that an update does not install it.
has_torch() {
  local locked
  locked=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements/lock.txt)
  compgen -G "$1/lib/python3*/site-packages/torch-$locked*.dist-info" >/dev/null
}

# Stops if the disk has less than $1 GB free: check_disk GB NAME
check_disk() {
  local free
  free=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1048576))
  [ "$free" -ge "$1" ] ||
    stop "disk: $free GB free at $root, the $2 needs about $1 GB." 'Free some space and start again.'
}

# Checks the disk before the first call of pip, by the build, the extras and the present installation.
check_disk_first() {
  local need=3
  if [ "$build" = cuda ]; then need=$cuda_gb; fi
  if [ "$rebuild" = no ] && has_torch .venv; then need=1; fi
  if [[ ",$extras," == *,dev,* ]]; then need=$((need + 1)); fi # compilers for CUDA, a linter, a browser
  check_disk "$need" "$build installation${extras:+ with $extras}"
}

# Whether an index replies for PyTorch within five seconds, through the environment's proxies. The certificate
# is not checked here: only pip downloads from the index, and pip checks it.
index_replies() {
  timeout 5 "$new/bin/python" -I - "$1" >/dev/null 2>&1 <<'END'
import ssl, sys, urllib.request
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", context=context).read(1)
END
}

# Whether the PyTorch that pip would install needs NVIDIA's libraries; yes if this pip cannot report it.
needs_cuda() {
  local report=$new/quasar-torch.json
  "$new/bin/python" -m pip install --help | grep -e --report >/dev/null || return 0
  watched "$new/bin/python" -m pip install --dry-run --no-deps --report "$report" --only-binary=:all: --no-input \
    --disable-pip-version-check --constraint requirements/lock.txt "$@" torch >>"$log" 2>&1 || return 1
  grep -qE '"(nvidia|cuda)-' "$report"
}

# Runs a command; prints a line with its progress every ten seconds.
watched() {
  local since=$SECONDS next=10 job line
  "$@" 3>&- &
  job=$!
  trap 'kill "$job" 2>/dev/null; wait "$job" || true; say "interrupted; .venv is unchanged"; exit 1' INT TERM HUP
  while kill -0 "$job" 2>/dev/null; do
    sleep 0.2
    [ $((SECONDS - since)) -ge "$next" ] || continue
    next=$((next + 10))
    line=$({ grep -E '^ *(Collecting|Downloading|Building|Installing)' "$log" 2>/dev/null || true; } | tail -n 1 | tr -s ' ')
    line=${line:-${*:1:2}}
    say "  $((SECONDS - since)) s${new:+, $(du -sm "$new" | cut -f 1) MB}: ${line:0:70}"
  done
  trap - INT TERM HUP
  wait "$job"
}

# Runs pip with its output in the log.
run_pip() {
  watched "$new/bin/python" -m pip install --only-binary=:all: --no-input --disable-pip-version-check \
    --progress-bar off --constraint requirements/lock.txt "$@" >>"$log" 2>&1 || explain_failure
}

explain_failure() {
  grep -v WARNING "$log" | tail -n 15 >&2
  say "pip failed; all of its output is in $log"
  if grep -qi 'no space left on device\|disk quota exceeded' "$log"; then
    stop 'The disk is full (pip also writes to its cache and to TMPDIR). Free some space, start again.'
  elif grep -qiE 'failed to establish|name resolution|max retries|read timed out' "$log" ||
    grep -qE 'Connection(Error|Reset|Refused)|from versions: none|ResolutionImpossible' "$log"; then
    say 'The package index could not be reached, or lacks a version of requirements/lock.txt. Check' \
      'the network, proxy and pip configuration, then start again.'
    say '(After a change of pyproject.toml: scripts/lock.sh brings the lock up to date.)'
  else
    say 'The message above is from pip. Correct the fault that it names, then start again.'
  fi
  exit 1
}

# Installs PyTorch from TORCH_INDEX_URL or PyTorch's CPU index, if one of them applies.
install_torch() {
  local index=${TORCH_INDEX_URL:-}
  if [ -z "$index" ] && [ "$build" = cpu ]; then
    if index_replies "$cpu_index"; then
      say "no NVIDIA GPU: PyTorch's CPU build is taken from $cpu_index"
      index=$cpu_index
    else
      say "no NVIDIA GPU, and $cpu_index cannot be reached: PyTorch is taken from pip's index" \
        '(set TORCH_INDEX_URL for another)'
    fi
  fi
  if [ "$build" = cpu ] && [ "$index" != "$cpu_index" ] && needs_cuda ${index:+--index-url "$index"}; then
    check_disk "$cuda_gb" 'CUDA build of PyTorch, which this package index has,'
  fi
  # Such an index may lack the locked versions of PyTorch's dependencies: the next call of pip installs them.
  if [ -n "$index" ]; then run_pip --no-deps --index-url "$index" torch; fi
}

install_all() {
  say 'installing PyTorch and the other dependencies (minutes on a new machine)'
  if ! has_torch "$new"; then install_torch; fi
  run_pip --editable ".${extras:+[$extras]}"
  # The distribution does not contain `neurons`; scripts and child processes import it from here.
  rm -f "$new"/lib/python3*/site-packages/quasar-checkout.pth
  echo "$root" >"$("$new/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quasar-checkout.pth"
}

case ${1:-} in
  -h | --help)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/install.sh
    echo "Extras: all $(known_extras | paste -sd ' ')"
    exit 0
    ;;
esac
named=()
for name in "$@"; do
  if [ "$name" = all ]; then
    mapfile -t -O ${#named[@]} named < <(known_extras | grep -vxF dev)
  else
    named+=("$name")
  fi
done
set -- ${named[@]+"${named[@]}"}
check_extras "$@"

build=${BUILD:-cpu}
case $build in cpu | cuda) ;; *) stop "BUILD=$build: give cpu or cuda, or leave it unset." ;; esac
# A CUDA build is kept even if no GPU is found: the driver may be missing temporarily.
if [ "$(recorded build)" = cuda ] || has_gpu; then build=cuda; fi
# Recorded extras that no longer exist are dropped.
kept=$(recorded extras | tr , '\n' | grep -xF -f <(known_extras) || true)
extras=$(printf '%s\n' "$@" "$kept" | sed '/^$/d' | sort -u | paste -sd ,)
up_to_date() { [ "$(cat "$stamp" 2>/dev/null)" = "$(wanted_stamp)" ] && .venv/bin/python -c '' 2>/dev/null; }

if [ -n "${PYTHON:-}" ] && [ -e "$stamp" ]; then check_python; fi
if up_to_date; then
  let_all_read
  if compgen -G "$folders/*" | grep -qvxF -e "$(readlink .venv)" && [ -w "$folders" ] && lock --nonblock; then
    remove_unused
  fi
  exit 0
fi
if ! lock --nonblock; then
  say 'another start is installing; waiting for it'
  lock
fi
up_to_date && exit 0

check_writable
if [ -n "$(recorded build)" ] && [ "$(recorded root)" != "$root" ] && .venv/bin/python -c '' 2>/dev/null; then
  adapt_to_move
  up_to_date && exit 0
fi

[ ! -e .venv ] || [ -e "$stamp" ] ||
  stop "$root/.venv was not made by this script. Move it away or remove it, then start again."
[ ! -d .venv ] || [ -L .venv ] || [ "$(stat -c %d .venv)" = "$(stat -c %d .)" ] ||
  stop "$root/.venv is a mounted volume, which cannot be replaced: mount it at $root/$folders."
rebuild=no
if [ "$(recorded root)" != "$root" ] || [ "$(recorded build)" != "$build" ] ||
  ! .venv/bin/python -c '' 2>/dev/null; then
  rebuild=yes # also if an earlier version of this script was interrupted: pip cannot recognise half a package
fi
remove_unused
check_disk_first
[ "$rebuild" = no ] || python=$(find_python)
make_folder
install_all
wanted_stamp >"$new/quasar-install"
move_link
let_all_read
remove_unused
say "done in $SECONDS s"
