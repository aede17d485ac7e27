#!/usr/bin/env bash
# Reproduce the paper: one preset, every table and figure, and a report with the paper's numbers beside ours.
#
#   bash run_all.sh                            presets and targets
#   bash run_all.sh smollm2-135m               everything for the embedded model (no GPU, no hub): below 30 minutes
#   bash run_all.sh smollm2-135m table5 fig2   two of them: below 4 minutes
#   bash run_all.sh llama2-7b table5           one table of the paper's main model (needs the hub and a GPU)
#   bash run_all.sh --dry-run llama2-7b        print the commands only, to run one by hand
#   bash run_all.sh test                       the test suite
#
# Interrupted and started again, it goes on from the artifacts in runs/<preset>/ and says which ones it reuses.
# The experiments themselves, their sizes and their commands: utils/paper/experiments.py.
set -euo pipefail
export CALLED_FROM=$PWD  # paths that the user names are seen from there

python=$(command -v python3.11 || command -v python3) || { echo "error: Python 3.11 is needed" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: Python 3.11 or newer is needed, $python is $("$python" -V)" >&2; exit 2; }

cd "$("$python" -c 'import os, sys; print(os.path.dirname(os.path.realpath(sys.argv[1])))' "${BASH_SOURCE[0]}")"

# A virtual environment with the pinned requirements, made once and again when requirements.txt changes.
setup() {
  local stamp
  stamp=$(cksum < requirements.txt)
  if [ "$(cat .venv/.requirements 2>/dev/null)" != "$stamp" ]; then
    echo "setting up .venv (once; some minutes)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet -r requirements.txt
    echo "$stamp" > .venv/.requirements
  fi
  export PATH="$PWD/.venv/bin:$PATH"
}

if [ "${1:-}" = test ]; then
  shift
  setup
  exec python -m pytest -q "$@"
fi
# To show the usage or the commands, and to refuse wrong input, takes no packages.
show=
[ $# -gt 0 ] || show=yes
for word in "$@"; do
  case "$word" in -h | --help | --dry-run) show=yes ;; esac
done
if [ -n "$show" ] || ! "$python" -m utils.paper.reproduce "$@" --dry-run > /dev/null 2>&1; then
  exec "$python" -m utils.paper.reproduce "$@"
fi
setup
exec python -m utils.paper.reproduce "$@"
