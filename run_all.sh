#!/usr/bin/env bash
# Reproduce the paper: one preset, every table that is built so far, and a report.
#
#   bash run_all.sh                       presets and targets
#   bash run_all.sh smollm2-135m          everything for the embedded model (no GPU, no hub): below 10 minutes
#   bash run_all.sh llama2-7b table5      one table of the paper's main model (needs the hub and a GPU)
#   bash run_all.sh --dry-run llama2-7b   print the commands only
#   bash run_all.sh test                  the test suite
#
# Interrupted and started again, it goes on from the artifacts in runs/<preset>/ and says which ones it reuses.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

TARGETS="table7 table5"

usage() {
  cat <<EOF
usage: bash run_all.sh [--dry-run] PRESET [TARGET ...]    or    bash run_all.sh test [pytest options]

presets   smollm2-135m           embedded: comes from the package index, runs on a laptop
          llama2-7b llama2-13b llama3-8b baichuan2-7b deepseek-r1-qwen-7b deepseek-r1-llama-8b
                                 from the hub, with the paper's sizes
          or any hub id, folder or .gguf file
targets   table7                 the layers that go: selection.json for every n
          table5                 perplexity of dense, vanilla, +d and +P, and sigma_d
          all                    all of them (default); each writes runs/<preset>/report.md

SIZE=small runs the same commands on a few short windows, to see that everything works (about 2 minutes).
LINEARPATCH_DATA=FOLDER takes WikiText-2, C4 and PTB from local files instead of the embedded text or the hub.
EOF
}

# ---------------------------------------------------------------------------------------------------------------------
# Sizes. The paper: 128 windows of 2048 tokens to calibrate, all windows of each corpus to evaluate.
# On two CPU cores the embedded model runs about 570 tokens a second, hence its smaller sizes.
sizes() {
  case "$1" in
    llama2-7b)             LAYERS="9 7" ;;
    llama2-13b)            LAYERS="10 8" ;;
    llama3-8b)             LAYERS="7 5" ;;
    baichuan2-7b)          LAYERS="9 7" ;;
    deepseek-r1-qwen-7b)   LAYERS="7" ;;
    deepseek-r1-llama-8b)  LAYERS="7" ;;
    *)                     LAYERS="3 5 7" ;;
  esac
  CALIB=(--calib-samples 128 --seq-len 2048)
  EVAL=(--seq-len 2048)
  SIGMA=128
  CORPUS=wikitext2
  DATASETS=(wikitext2 c4 ptb)
  if [ "$1" = smollm2-135m ]; then
    CALIB=(--calib-samples 32 --seq-len 512)
    EVAL=(--seq-len 512 --limit-windows 12)
    SIGMA=4
    if [ -z "${LINEARPATCH_DATA:-}" ]; then
      CORPUS=wiki
      DATASETS=(wiki news)
    fi
  fi
  if [ "${SIZE:-}" = small ]; then
    CALIB=(--calib-samples 4 --seq-len 256)
    EVAL=(--seq-len 256 --limit-windows 3)
    SIGMA=2
  fi
}

# ---------------------------------------------------------------------------------------------------------------------
# A virtual environment with the pinned requirements, made once and again when requirements.txt changes.
setup() {
  local python stamp
  python=$(command -v python3.11 || command -v python3) || { echo "error: Python 3.11 is needed" >&2; exit 2; }
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed, $python is $("$python" -V)" >&2; exit 2; }
  stamp=$(cksum < requirements.txt)
  if [ "$(cat .venv/.requirements 2>/dev/null)" != "$stamp" ]; then
    echo "setting up .venv (once; some minutes)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet -r requirements.txt
    echo "$stamp" > .venv/.requirements
  fi
  PATH="$PWD/.venv/bin:$PATH"
}

run() {
  echo "+ $*"
  [ -n "$DRY_RUN" ] || "$@"
}

# ---------------------------------------------------------------------------------------------------------------------
# Table 7: one pass over the calibration text, then the block for every n from its statistics.
table7() {
  [[ " $DONE " != *" table7 "* ]] || return 0
  DONE+=" table7"
  for n in $LAYERS; do
    run python prune.py --model "$PRESET" --metric cosine --n-prune "$n" --calib-data "$CORPUS" "${CALIB[@]}" \
      --stats "$DIR/stats.safetensors" --out "$DIR/n$n/selection.json"
  done
}

# Table 5: the ingredients. d on the raw channels, P in the rotated basis; perplexity of all variants in one call.
table5() {
  local variants=()
  table7
  for n in $LAYERS; do
    for scaling in diagonal hadamard; do
      run python calibrate.py --model "$PRESET" --selection "$DIR/n$n/selection.json" --scaling "$scaling" \
        --calib-data "$CORPUS" "${CALIB[@]}" --stats "$DIR/stats.safetensors" \
        $([ "$scaling" = hadamard ] && echo --sigma-windows "$SIGMA") --out "$DIR/n$n/patch_$scaling.safetensors"
    done
    variants+=("d-n$n=$DIR/n$n/patch_diagonal.safetensors" "P-n$n=$DIR/n$n/patch_hadamard.safetensors")
  done
  run python eval_ppl.py --model "$PRESET" --selection $(for n in $LAYERS; do echo "vanilla-n$n=$DIR/n$n/selection.json"; done) \
    --patch "${variants[@]}" --datasets "${DATASETS[@]}" "${EVAL[@]}" --out "$DIR/ppl.json"
}

# ---------------------------------------------------------------------------------------------------------------------
main() {
  DRY_RUN= DONE=
  if [ "${1:-}" = --dry-run ]; then DRY_RUN=yes; shift; fi
  case "${1:-}" in
    "" | -h | --help) usage; return ;;
    test) shift; setup; exec python -m pytest -q "$@" ;;
    -*) echo "error: $1 is no option; see 'bash run_all.sh'" >&2; exit 2 ;;
  esac
  PRESET=$1; shift
  DIR="runs/$(basename "$PRESET" .gguf)"
  [ $# -gt 0 ] && [ "$*" != all ] || set -- $TARGETS
  for target in "$@"; do
    [[ " $TARGETS " == *" $target "* ]] || { echo "error: $target is no target; there are: $TARGETS all" >&2; exit 2; }
  done
  sizes "$PRESET"
  [ -n "$DRY_RUN" ] || setup
  for target in "$@"; do "$target"; done
  run python -m utils.report "$DIR"
}

main "$@"
