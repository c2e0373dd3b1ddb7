# shellcheck shell=bash
# Handles --help and --version before the installation: . scripts/before_install.sh PROGRAM "$@"
#
# An unknown command or flag ends the script with status 78. scripts/help/PROGRAM.txt is the output of
# --help of the installed program; a test compares the two.

help=scripts/help/$1.txt
shift

# Prints the version and the commit, as the installed program does.
show_version() {
  local commit=
  [ ! -e .git ] || commit=$(git rev-parse --verify HEAD 2>/dev/null | cut -c 1-12)
  echo "quasar-miner $(sed -n 's/^__version__ = "\(.*\)"/\1/p' quasar_kernels/__init__.py)${commit:+ at $commit}"
}

refuse() { # SENTENCE [WORD ALTERNATIVES]
  local near=
  [ $# -eq 1 ] || near=$(
    # shellcheck disable=SC2086 # each word is an alternative
    python3 -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1))' "$2" $3 2>/dev/null
  ) || true
  [ -z "$near" ] || near=" Did you mean '$near'?"
  echo "${0##*/}: $1$near (${0##*/} --help lists them)" >&2
  exit 78
}

commands=$(sed -n '/^Commands:/,$s/^  \([a-z]*\) .*/\1/p' "$help")
with_value=$(sed -nE 's/^  (--[a-z._-]+) [^ ].*/\1/p' "$help")
without_value=$(sed -nE 's/^  (--[a-z._-]+)(  .*)?$/\1/p' "$help")
contains() { grep -qxF -e "$2" <<<"$1"; }

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) cat "$help" && exit ;;
    --version) show_version && exit ;;
    --*=*)
      ! contains "$without_value" "${1%%=*}" || refuse "Option '${1%%=*}' takes no value."
      contains "$with_value" "${1%%=*}" || refuse "There is no option '${1%%=*}'." "${1%%=*}" "$with_value"
      ;;
    -*)
      if contains "$with_value" "$1"; then
        [ $# -gt 1 ] || refuse "Option '$1' needs a value."
        shift
      else
        contains "$without_value" "$1" || refuse "There is no option '$1'." "$1" "$with_value $without_value"
      fi
      ;;
    *)
      contains "$commands" "$1" || refuse "There is no command '$1'." "$1" "$commands"
      break # the rest are the command's own arguments
      ;;
  esac
  shift
done
# shellcheck disable=SC2034 # START_MINER.sh reads it
case " ${*:2} " in
  *' -h '* | *' --help '*) command=help ;;
  *) command=${1:-} ;;
esac
