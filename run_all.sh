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

TARGETS="table7 table5 table2 table3 table4 table9 table10 responses"
DEFAULT="table7 table5"

usage() {
  cat <<EOF
usage: bash run_all.sh [--dry-run] PRESET [TARGET ...]    or    bash run_all.sh test [pytest options]

presets   smollm2-135m           embedded: comes from the package index, runs on a laptop
          llama2-7b llama2-13b llama3-8b baichuan2-7b deepseek-r1-qwen-7b deepseek-r1-llama-8b
                                 from the hub, with the paper's sizes
          or any hub id, folder or .gguf file
targets   table7                 the layers that go: selection.json for every n
          table5                 perplexity of dense, vanilla, +d, +P and +FT (P distilled), and sigma_d
          table3, table2         perplexity, and question answering, of +P, +FT and LLM-Streamline's FFN
          table4                 what is trained and by which loss: FFN or P, full or diagonal, KL or MSE
          table9, table10        number of distillation windows; K of the top-K logits
          responses              P from a random start; d alone, fine-tuned; calibration on other corpora
          all                    table7 and table5, the default; each run writes runs/<preset>/report.md

SIZE=small runs the same commands on a few short windows, to see that everything works (about 3 minutes).
LINEARPATCH_DATA=FOLDER takes WikiText-2, C4 and PTB from local files instead of the embedded text or the hub.
EOF
}

# ---------------------------------------------------------------------------------------------------------------------
# Sizes. The paper: 128 windows of 2048 tokens to calibrate, all windows of each corpus to evaluate.
# On two CPU cores the embedded model runs about 570 tokens a second, hence its smaller sizes.
sizes() {
  # LAYERS: every n. TUNED: the n of tables 2, 3, 9 and 10. ABLATED: that of table 4 and the responses.
  case "$1" in
    llama2-7b)             LAYERS="9 7"  TUNED=7 ABLATED=9 ;;
    llama2-13b)            LAYERS="10 8" TUNED=8 ABLATED=8 ;;
    llama3-8b)             LAYERS="7 5"  TUNED=5 ABLATED=5 ;;
    baichuan2-7b)          LAYERS="9 7"  TUNED=7 ABLATED=7 ;;
    deepseek-r1-*)         LAYERS="7"    TUNED=7 ABLATED=7 ;;
    *)                     LAYERS="3 5 7" TUNED=7 ABLATED=7 ;;
  esac
  CALIB=(--calib-samples 128 --seq-len 2048)
  EVAL=(--seq-len 2048)
  SIGMA=128
  CORPUS=wikitext2
  DATASETS=(wikitext2 c4 ptb)
  OTHERS="c4 ptb"
  TRAIN=(--seq-len 2048 --val-samples 16)
  SAMPLES=5000 HALF=2500 MORE=7500
  if [ "$1" = smollm2-135m ]; then
    CALIB=(--calib-samples 32 --seq-len 512)
    EVAL=(--seq-len 512 --limit-windows 8)
    SIGMA=4
    TRAIN=(--seq-len 512 --val-samples 4 --save-every 16 --lr 1e-3)
    SAMPLES=32 HALF=16 MORE=48
    if [ -z "${LINEARPATCH_DATA:-}" ]; then
      CORPUS=wiki
      DATASETS=(wiki news)
      OTHERS=news
    fi
  fi
  if [ "${SIZE:-}" = small ]; then
    CALIB=(--calib-samples 4 --seq-len 256)
    EVAL=(--seq-len 256 --limit-windows 3)
    SIGMA=2
    TRAIN=(--seq-len 256 --val-samples 1 --save-every 4 --lr 1e-3)
    SAMPLES=4 HALF=2 MORE=6
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

# The training-free patches of one n: d on the raw channels, P in the rotated basis. No forward pass but for sigma_d.
patches() {
  for scaling in diagonal hadamard; do
    run python calibrate.py --model "$PRESET" --selection "$DIR/n$1/selection.json" --scaling "$scaling" \
      --calib-data "$CORPUS" "${CALIB[@]}" --stats "$DIR/stats.safetensors" \
      $([ "$scaling" = hadamard ] && echo --sigma-windows "$SIGMA") --out "$DIR/n$1/patch_$scaling.safetensors"
  done
}

# tune N NAME FLAGS: distil from the +P patch of N removed layers (or what FLAGS say) into $DIR/nN/NAME.safetensors.
tune() {
  local n=$1 name=$2
  shift 2
  run python distill.py --model "$PRESET" --patch "$DIR/n$n/patch_hadamard.safetensors" --train-data "$CORPUS" \
    "${TRAIN[@]}" "$@" --out "$DIR/n$n/$name.safetensors"
}

# Table 5: the ingredients, and P fine-tuned; perplexity of all variants in one call.
table5() {
  local variants=()
  table7
  for n in $LAYERS; do
    patches "$n"
    variants+=("d-n$n=$DIR/n$n/patch_diagonal.safetensors" "P-n$n=$DIR/n$n/patch_hadamard.safetensors")
    if [ "$n" = "$TUNED" ] || [ "$PRESET" != smollm2-135m ]; then
      tune "$n" ft --train-samples "$SAMPLES"
      variants+=("FT-n$n=$DIR/n$n/ft.safetensors")
    fi
  done
  run python eval_ppl.py --model "$PRESET" --selection $(for n in $LAYERS; do echo "vanilla-n$n=$DIR/n$n/selection.json"; done) \
    --patch "${variants[@]}" --datasets "${DATASETS[@]}" "${EVAL[@]}" --out "$DIR/ppl.json"
}

# ablation TABLE NAME...: perplexities of tuned variants of one n beside vanilla and +P, in $DIR/TABLE.json.
ablation() {
  local table=$1 n=$TUNED variants=()
  shift
  for name in "$@"; do variants+=("$name=$DIR/n$n/$name.safetensors"); done
  run python eval_ppl.py --model "$PRESET" --selection "vanilla=$DIR/n$n/selection.json" --patch \
    "P=$DIR/n$n/patch_hadamard.safetensors" "${variants[@]}" --datasets "${DATASETS[@]}" "${EVAL[@]}" --out "$DIR/$table.json"
}

# Tables 2 and 3: LinearPatch and its fine-tuning against LLM-Streamline's FFN on the same text.
table3() {
  table7; patches "$TUNED"
  tune "$TUNED" ft --train-samples "$SAMPLES"
  tune "$TUNED" ffn_mse --replace ffn --loss mse --train-samples "$SAMPLES"
  ablation table3 ft ffn_mse
}

table2() {
  table3
  run python eval_qa.py --model "$PRESET" --selection "vanilla=$DIR/n$TUNED/selection.json" --patch \
    "P=$DIR/n$TUNED/patch_hadamard.safetensors" "ft=$DIR/n$TUNED/ft.safetensors" "ffn_mse=$DIR/n$TUNED/ffn_mse.safetensors" \
    --tasks all $([ "$PRESET" = smollm2-135m ] && echo --limit 20) --out "$DIR/table2.json"
}

# Table 4: what is trained, and by which loss; the paper removes 9 layers here and in the responses.
table4() {
  local TUNED=$ABLATED
  table7; patches "$TUNED"
  tune "$TUNED" ffn_mse --replace ffn --loss mse --train-samples "$SAMPLES"
  tune "$TUNED" ffn_kl --replace ffn --train-samples "$SAMPLES"
  tune "$TUNED" full_mse --loss mse --train-samples "$SAMPLES"
  tune "$TUNED" diagonal_kl --trainable diagonal-hadamard --train-samples "$SAMPLES"
  tune "$TUNED" ft --train-samples "$SAMPLES"
  ablation table4 ffn_mse ffn_kl full_mse diagonal_kl ft
}

# Table 9: the number of windows.
table9() {
  table7; patches "$TUNED"
  for samples in "$HALF" "$SAMPLES" "$MORE"; do tune "$TUNED" "samples$samples" --train-samples "$samples"; done
  ablation table9 "samples$HALF" "samples$SAMPLES" "samples$MORE"
}

# Table 10: K.
table10() {
  table7; patches "$TUNED"
  for k in 50 100 200; do tune "$TUNED" "top$k" --top-k "$k" --train-samples "$SAMPLES"; done
  ablation table10 top50 top100 top200
}

# The author responses: P from a random start; d without H, fine-tuned; d from other corpora.
responses() {
  local TUNED=$ABLATED
  local n=$TUNED
  table7; patches "$n"
  tune "$n" random_start --init random --train-samples "$SAMPLES"
  run python distill.py --model "$PRESET" --patch "$DIR/n$n/patch_diagonal.safetensors" --train-data "$CORPUS" "${TRAIN[@]}" \
    --trainable diagonal --train-samples "$SAMPLES" --out "$DIR/n$n/d_tuned.safetensors"
  for corpus in $OTHERS; do
    run python calibrate.py --model "$PRESET" --selection "$DIR/n$n/selection.json" --calib-data "$corpus" "${CALIB[@]}" \
      --stats "$DIR/stats_$corpus.safetensors" --out "$DIR/n$n/from_$corpus.safetensors"
  done
  ablation responses random_start d_tuned $(for corpus in $OTHERS; do echo "from_$corpus"; done)
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
  [ $# -gt 0 ] && [ "$*" != all ] || set -- $DEFAULT
  for target in "$@"; do
    [[ " $TARGETS " == *" $target "* ]] || { echo "error: $target is no target; there are: $TARGETS all" >&2; exit 2; }
  done
  sizes "$PRESET"
  [ -n "$DRY_RUN" ] || setup
  for target in "$@"; do "$target"; done
  run python -m utils.report "$DIR"
}

main "$@"
