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
set -euo pipefail
CALLER=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"

TARGETS="table7 table5 table8 table3 table2 table4 table9 table10 responses table11 table12 table13 table1 table14
  table15 table16 metrics fig1 fig2 fig4 overhead storage"

usage() {
  cat <<EOF
usage: bash run_all.sh [--dry-run] PRESET [TARGET ...]    or    bash run_all.sh test [pytest options]

presets   smollm2-135m           embedded: comes from the package index, runs on a laptop
          llama2-7b llama2-13b llama3-8b baichuan2-7b deepseek-r1-qwen-7b deepseek-r1-llama-8b
                                 from the hub, with the paper's sizes
          or any hub id, folder or .gguf file
targets   table7                 the layers that go, by every metric of the table
          table5                 dense, vanilla, +d, +P and +FT (P distilled), and sigma_d
          table1 table14 table15 table16
                                 methods without training: question answering, perplexity, MMLU (1 and 14: two models)
          table2 table3 table4   after training, against LLM-Streamline's FFN; what is trained and by which loss
          table8 table9 table10  number of calibration windows, of distillation windows; K of the top-K logits
          table11 table12 table13  with the metrics of ShortGPT, Taylor+ and SLEB
          responses              P from a random start; d alone, fine-tuned; calibration on other corpora
          metrics                every selection metric at every n, alone and with the patch
          fig1 fig2 fig4         the figures, and those of stats.safetensors: massive, similarity, d
          overhead storage       section 4.4: cost of the patch, size of the teacher's cache
          all                    everything, the default; each run writes runs/<preset>/report.md and report.html

SIZE=small runs the same commands on a few short windows, to see that everything works.
LINEARPATCH_DATA=FOLDER takes data sets from local files instead of the embedded text or the hub. The embedded model
answers questions (tables 1, 2, 16, ...) with it only.
EOF
}

# ---------------------------------------------------------------------------------------------------------------------
# Sizes. The paper: 128 windows of 2048 tokens to calibrate, all windows of each corpus to evaluate, 5000 to distil.
# On two CPU cores the embedded model runs about 570 tokens a second, hence its smaller sizes.
sizes() {
  # LAYERS: every n. TUNED: the n of tables 2, 3, 9 and 10. ABLATED: that of tables 4, 5, 8 and the responses.
  # COMBINED: that of tables 11 to 13. OTHERS: models of figure 4 beside this one.
  case "$1" in
    llama2-7b)             LAYERS="9 7"  TUNED=7 ABLATED=9 COMBINED=7 ;;
    llama2-13b)            LAYERS="10 8" TUNED=8 ABLATED=8 COMBINED=8 ;;
    llama3-8b)             LAYERS="7 5"  TUNED=5 ABLATED=5 COMBINED=7 ;;
    baichuan2-7b)          LAYERS="9 7"  TUNED=7 ABLATED=7 COMBINED=7 ;;
    deepseek-r1-*)         LAYERS="7"    TUNED=7 ABLATED=7 COMBINED=7 ;;
    *)                     LAYERS="3 5 7" TUNED=7 ABLATED=7 COMBINED=7 ;;
  esac
  CALIB=(--calib-samples 128 --seq-len 2048)
  SEARCH=(--calib-samples 128 --seq-len 2048)            # what SLEB tries its candidates on
  SNIPPETS=(--calib-samples 10 --seq-len 128 --seed 1234)  # Shortened LLaMA's, for Taylor and one-shot perplexity
  WIDTH=(--calib-data c4 --calib-samples 10 --seq-len 64)  # LLM-Pruner's
  EVAL=(--seq-len 2048)
  SIGMA=128
  CORPUS=wikitext2
  DATASETS=(wikitext2 c4 ptb)
  ELSEWHERE="c4 ptb"                                     # other corpora to calibrate on
  TRAIN=(--seq-len 2048 --val-samples 16)
  SAMPLES=5000 HALF=2500 MORE=7500
  QA=(--tasks all) MMLU=(--subjects all)
  SHOWN=16 SWEEP=()                                      # windows behind the figures; limits of the sweep of alpha
  METRICS=(sleb shortgpt taylor+)                        # of table 7
  COMPARED=(wikitext2 c4 ptb)                            # corpora on which all metrics are compared
  if [ "$1" = smollm2-135m ]; then
    CALIB=(--calib-samples 16 --seq-len 512)
    SEARCH=(--calib-samples 2 --seq-len 64)
    SNIPPETS=(--calib-samples 4 --seq-len 64 --seed 1234)
    EVAL=(--seq-len 256 --limit-windows 4)
    SIGMA=4
    TRAIN=(--seq-len 256 --val-samples 4 --save-every 16 --lr 1e-3)
    SAMPLES=16 HALF=8 MORE=24
    QA+=(--limit 20) MMLU+=(--limit 2)
    SHOWN=2 SWEEP=(--limit-windows 2)
    COMPARED=(wikitext2)
    if [ -z "${LINEARPATCH_DATA:-}" ]; then
      CORPUS=wiki
      DATASETS=(wiki news)
      COMPARED=(wiki)
      ELSEWHERE=news
      WIDTH=(--calib-data wiki --calib-samples 10 --seq-len 64)
    fi
  fi
  if [ "${SIZE:-}" = small ]; then
    CALIB=(--calib-samples 4 --seq-len 128)
    SEARCH=(--calib-samples 1 --seq-len 32)
    SNIPPETS=(--calib-samples 1 --seq-len 32 --seed 1234)
    WIDTH=("${WIDTH[@]:0:2}" --calib-samples 2 --seq-len 64)
    EVAL=(--seq-len 128 --limit-windows 2)
    SIGMA=2
    TRAIN=(--seq-len 128 --val-samples 1 --save-every 4 --lr 1e-3)
    SAMPLES=4 HALF=2 MORE=6
    QA=(--tasks all --limit 2) MMLU=(--subjects anatomy astronomy --limit 2)
    SHOWN=1 SWEEP=(--limit-windows 1)
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

# A command is run once, however many targets need it. All wait in COMMANDS, so that one interpreter can load the
# libraries for all of them (utils/paper/reproduce.py); each is a command that can be typed by hand.
run() {
  local word line=
  for word; do
    [[ "$word" =~ ^[][A-Za-z0-9_./:=+,@%{}-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
    line+=" $word"
  done
  line=${line# }
  [[ "$COMMANDS" == *$'\n'"$line"$'\n'* ]] || COMMANDS+="$line"$'\n'
}

# ---------------------------------------------------------------------------------------------------------------------
# Variants wait here until all targets have made theirs; then one call evaluates all of them on shared layers.
declare -A PPL=() SIDE=() QAS=() MMLUS=()
ORDER=()

# variant KINDS NAME FILE: NAME is a row of the report; FILE a selection.json or a patch. KINDS: ppl, side (perplexity
# on the corpora on which all metrics are compared), qa, mmlu.
variant() {
  local kind
  for kind in $1; do
    case "$kind" in
      ppl) PPL[$2]=$3 ;;
      side) SIDE[$2]=$3 ;;
      qa) QAS[$2]=$3 ;;
      mmlu) MMLUS[$2]=$3 ;;
    esac
  done
  [[ " ${ORDER[*]-} " == *" $2 "* ]] || ORDER+=("$2")
}

# flags KIND: --selection and --patch of the waiting variants, in the order in which targets named them.
flags() {
  local -n waiting=$1
  local name selections=() patches=()
  for name in "${ORDER[@]}"; do
    case "${waiting[$name]-}" in
      "") ;;
      *.json) selections+=("$name=${waiting[$name]}") ;;
      *) patches+=("$name=${waiting[$name]}") ;;
    esac
  done
  FLAGS=()
  [ ${#selections[@]} -eq 0 ] || FLAGS+=(--selection "${selections[@]}")
  [ ${#patches[@]} -eq 0 ] || FLAGS+=(--patch "${patches[@]}")
}

evaluate() {
  local n folder
  if [ ${#PPL[@]} -gt 0 ]; then
    flags PPL
    run python eval_ppl.py --model "$PRESET" "${FLAGS[@]}" --datasets "${DATASETS[@]}" "${EVAL[@]}" \
      --add --out "$DIR/ppl.json"
    for n in $NARROW; do
      run python eval_ppl.py --model "$DIR/n$n/llm-pruner/model" --no-dense --patch "llm-pruner-n$n=dense" \
        --datasets "${DATASETS[@]}" "${EVAL[@]}" --out "$DIR/ppl_llm-pruner-n$n.json"
    done
  fi
  if [ ${#SIDE[@]} -gt 0 ]; then
    flags SIDE
    run python eval_ppl.py --model "$PRESET" "${FLAGS[@]}" --datasets "${COMPARED[@]}" "${EVAL[@]}" \
      --add --out "$DIR/ppl.json"
    run python plot_magnitudes.py --figure metrics --results "$DIR/ppl.json" --out "$DIR/figures"
  fi
  if [ ${#QAS[@]} -gt 0 ] && answers; then
    flags QAS
    run python eval_qa.py --model "$PRESET" "${FLAGS[@]}" "${QA[@]}" --add --out "$DIR/qa.json"
    for n in $NARROW; do
      run python eval_qa.py --model "$DIR/n$n/llm-pruner/model" --no-dense --patch "llm-pruner-n$n=dense" "${QA[@]}" \
        --dense "$DIR/qa.json" --out "$DIR/qa_llm-pruner-n$n.json"
    done
  fi
  if [ ${#MMLUS[@]} -gt 0 ] && answers; then
    flags MMLUS
    run python eval_mmlu.py --model "$PRESET" "${FLAGS[@]}" "${MMLU[@]}" --add --out "$DIR/mmlu.json"
  fi
}

# The data sets of questions come from the hub; on the embedded model, which needs no hub, from local files only.
answers() {
  [ "$PRESET" != smollm2-135m ] || [ -n "${LINEARPATCH_DATA:-}" ] || {
    [ -n "$TOLD" ] || echo "question answering and MMLU are left out: they need LINEARPATCH_DATA=FOLDER" \
      "(README, section Data)" >&2
    TOLD=yes
    return 1
  }
}

# ---------------------------------------------------------------------------------------------------------------------
# One pass over the calibration text; the block for every n is read from its statistics.
blocks() {
  run python prune.py --model "$PRESET" --metric cosine --n-prune $LAYERS --calib-data "$CORPUS" "${CALIB[@]}" \
    --stats "$DIR/stats.safetensors" --out "$DIR/n{n}/selection.json"
}

# selection METRIC FLAGS: for every n, in $DIR/nN/METRIC/selection.json. One run where n layers are the first n of more.
selection() {
  local metric=$1
  shift
  run python prune.py --model "$PRESET" --metric "$metric" --n-prune $LAYERS --calib-data "$CORPUS" "$@" \
    --out "$DIR/n{n}/$metric/selection.json"
}

select_by() {
  case "$1" in
    sleb)                     selection sleb "${SEARCH[@]}" ;;
    taylor | taylor+ | ppl | ppl+) selection "$1" "${SNIPPETS[@]}" ;;
    mag | mag+ | random | last) selection "$1" ;;
    *)                        selection "$1" "${CALIB[@]}" --stats "$DIR/stats.safetensors" ;;
  esac
}

# The training-free patches of the cosine block, for every n: d on the raw channels, P in the rotated basis.
patches() {
  blocks
  run python calibrate.py --model "$PRESET" --selection $(for n in $LAYERS; do echo "$DIR/n$n/selection.json"; done) \
    --scaling diagonal hadamard --calib-data "$CORPUS" "${CALIB[@]}" --stats "$DIR/stats.safetensors" \
    --sigma-windows "$SIGMA"
}

# patched METRIC...: P for the selections of other metrics, in $DIR/nN/METRIC/patch_hadamard.safetensors. No forward
# pass.
patched() {
  local metric
  run python calibrate.py --model "$PRESET" --scaling hadamard --calib-data "$CORPUS" "${CALIB[@]}" \
    --stats "$DIR/stats.safetensors" \
    --selection $(for metric; do for n in $LAYERS; do echo "$DIR/n$n/$metric/selection.json"; done; done)
}

# ours KINDS N: dense comes by itself; vanilla, +d, +P of the cosine block at N.
ours() {
  variant "$1" "vanilla-n$2" "$DIR/n$2/selection.json"
  variant "$1" "d-n$2" "$DIR/n$2/patch_diagonal.safetensors"
  variant "$1" "P-n$2" "$DIR/n$2/patch_hadamard.safetensors"
}

# tune KINDS N NAME FLAGS: distil from the +P patch of N removed layers (or as FLAGS say): variant NAME-nN.
tune() {
  local kinds=$1 n=$2 name=$3
  shift 3
  run python distill.py --model "$PRESET" --patch "$DIR/n$n/patch_hadamard.safetensors" --train-data "$CORPUS" \
    "${TRAIN[@]}" "$@" --out "$DIR/n$n/$name.safetensors"
  variant "$kinds" "$name-n$n" "$DIR/n$n/$name.safetensors"
}

# ---------------------------------------------------------------------------------------------------------------------
# Table 7: the layers that go.
table7() {
  local metric
  blocks
  for metric in "${METRICS[@]}"; do select_by "$metric"; done
}

# Table 5: the ingredients, at one n. (The target metrics has them for every n, without training.)
table5() {
  patches
  ours "ppl qa" "$ABLATED"
  tune "ppl qa" "$ABLATED" FT --train-samples "$SAMPLES"
}

# Tables 1 and 14 (question answering), 15 (perplexity) and 16 (MMLU): methods without training, at every n.
untrained() {
  local kind=$1 n metric
  patches
  for metric in sleb shortgpt; do select_by "$metric"; done
  patched shortgpt
  for n in $LAYERS; do
    for metric in sleb shortgpt; do variant "$kind" "$metric-n$n" "$DIR/n$n/$metric/selection.json"; done
    variant "$kind" "vanilla-n$n" "$DIR/n$n/selection.json"
    variant "$kind" "shortgpt+P-n$n" "$DIR/n$n/shortgpt/patch_hadamard.safetensors"
    variant "$kind" "P-n$n" "$DIR/n$n/patch_hadamard.safetensors"
  done
}

# LLM-Pruner leaves every layer, but narrower; as many parameters go as with n layers. The paper has it for three
# models.
narrow() {
  local n
  [[ "$PRESET" != deepseek* ]] || return 0
  for n in $LAYERS; do
    run python prune.py --model "$PRESET" --metric llm-pruner --n-prune "$n" "${WIDTH[@]}" \
      --out "$DIR/n$n/llm-pruner/selection.json" --save-model "$DIR/n$n/llm-pruner/model"
  done
  NARROW=$LAYERS
}

table1() { narrow; untrained qa; }
table14() { table1; }
table15() { narrow; untrained ppl; }
table16() { untrained mmlu; }

# Tables 2 and 3: LinearPatch and its fine-tuning against LLM-Streamline's FFN on the same text.
trained() {
  patches
  variant "$1" "P-n$TUNED" "$DIR/n$TUNED/patch_hadamard.safetensors"
  tune "$1" "$TUNED" FT --train-samples "$SAMPLES"
  tune "$1" "$TUNED" ffn_mse --replace ffn --loss mse --train-samples "$SAMPLES"
}

table2() { trained qa; }
table3() { trained ppl; }

# Table 4: what is trained, and by which loss.
table4() {
  local n=$ABLATED
  patches
  tune "ppl qa" "$n" ffn_mse --replace ffn --loss mse --train-samples "$SAMPLES"
  tune "ppl qa" "$n" ffn_kl --replace ffn --train-samples "$SAMPLES"
  tune "ppl qa" "$n" P_mse --loss mse --train-samples "$SAMPLES"
  tune "ppl qa" "$n" d_kl --trainable diagonal-hadamard --train-samples "$SAMPLES"
  tune "ppl qa" "$n" FT --train-samples "$SAMPLES"
}

# Table 8: the number of calibration windows.
table8() {
  local n=$ABLATED times samples
  patches
  variant ppl "P-n$n" "$DIR/n$n/patch_hadamard.safetensors"
  for times in 4 2 0.5; do  # the first statistics hold the others: fewer windows are the first ones of more
    samples=$(awk "BEGIN { print $times * ${CALIB[1]} }")
    run python calibrate.py --model "$PRESET" --selection "$DIR/n$n/selection.json" --calib-data "$CORPUS" \
      --calib-samples "$samples" "${CALIB[@]:2}" --stats "$DIR/stats_4x.safetensors" \
      --out "$DIR/n$n/calib${times}x.safetensors"
    variant ppl "calib${times}x-n$n" "$DIR/n$n/calib${times}x.safetensors"
  done
}

# Table 9: the number of distillation windows.
table9() {
  patches
  variant "ppl qa" "P-n$TUNED" "$DIR/n$TUNED/patch_hadamard.safetensors"
  tune "ppl qa" "$TUNED" samples0.5x --train-samples "$HALF"
  tune "ppl qa" "$TUNED" FT --train-samples "$SAMPLES"
  tune "ppl qa" "$TUNED" samples1.5x --train-samples "$MORE"
}

# Table 10: K; 100 is FT.
table10() {
  patches
  variant "ppl qa" "P-n$TUNED" "$DIR/n$TUNED/patch_hadamard.safetensors"
  tune "ppl qa" "$TUNED" FT --train-samples "$SAMPLES"
  tune "ppl qa" "$TUNED" top50 --top-k 50 --train-samples "$SAMPLES"
  tune "ppl qa" "$TUNED" top200 --top-k 200 --train-samples "$SAMPLES"
}

# Tables 11 to 13: other metrics, alone and with LinearPatch.
with_metric() {
  local metric=$1 n=$COMBINED
  blocks
  select_by "$metric"
  patched "$metric"
  variant "ppl qa" "$metric-n$n" "$DIR/n$n/$metric/selection.json"
  variant "ppl qa" "$metric+P-n$n" "$DIR/n$n/$metric/patch_hadamard.safetensors"
}

table11() { with_metric shortgpt; }
table12() { with_metric taylor+; }
table13() { with_metric sleb; }

# The author responses: P from a random start; d without H, fine-tuned; d from other corpora.
responses() {
  local n=$ABLATED corpus
  patches
  ours ppl "$n"
  tune ppl "$n" random_start --init random --train-samples "$SAMPLES"
  run python distill.py --model "$PRESET" --patch "$DIR/n$n/patch_diagonal.safetensors" --train-data "$CORPUS" \
    "${TRAIN[@]}" --trainable diagonal --train-samples "$SAMPLES" --out "$DIR/n$n/d_tuned.safetensors"
  variant ppl "d_tuned-n$n" "$DIR/n$n/d_tuned.safetensors"
  for corpus in $ELSEWHERE; do
    run python calibrate.py --model "$PRESET" --selection "$DIR/n$n/selection.json" --calib-data "$corpus" \
      "${CALIB[@]}" --stats "$DIR/stats_$corpus.safetensors" --out "$DIR/n$n/P-from-$corpus.safetensors"
    variant ppl "P-from-$corpus-n$n" "$DIR/n$n/P-from-$corpus.safetensors"
  done
}

# Every metric at every n, alone and with the patch, side by side.
metrics() {
  local metric n all=(shortgpt angular sleb taylor taylor+ ppl ppl+ mag mag+ random last)
  patches
  for metric in "${all[@]}"; do select_by "$metric"; done
  patched "${all[@]}"
  for n in $LAYERS; do
    ours ppl "$n"
    for metric in "${all[@]}"; do
      variant side "$metric-n$n" "$DIR/n$n/$metric/selection.json"
      variant side "$metric+P-n$n" "$DIR/n$n/$metric/patch_hadamard.safetensors"
    done
  done
}

# ---------------------------------------------------------------------------------------------------------------------
# Figures. 1: channel magnitudes and the sweep of alpha. 2: scalings of single tokens. 4: depth, of all models that have
# been run, and more from the statistics.
figure() {
  run python plot_magnitudes.py --stats "$DIR/stats.safetensors" --figure "$@" --out "$DIR/figures"
}

chosen() {
  local n
  for n in $LAYERS; do echo "n$n=$DIR/n$n/selection.json"; done
}

fig1() {
  patches
  figure 1a 1b --model "$PRESET" --calib-data "$CORPUS" "${CALIB[@]}" --windows "$SHOWN" --datasets "${DATASETS[0]}" \
    "${SWEEP[@]}" --patch "d=$DIR/n$ABLATED/patch_diagonal.safetensors" "P=$DIR/n$ABLATED/patch_hadamard.safetensors"
}

fig2() {
  blocks
  figure 2 --model "$PRESET" --calib-data "$CORPUS" "${CALIB[@]}" --windows "$SHOWN" \
    --selection $(chosen)
}

fig4() {
  local other stats=("$PRESET=$DIR/stats.safetensors") selections=() file
  blocks
  for other in runs/*/; do
    other=${other%/}
    [ "$other" != "$DIR" ] && [ -f "$other/stats.safetensors" ] || continue
    stats+=("${other#runs/}=$other/stats.safetensors")
    for file in "$other"/n*/selection.json; do
      [ ! -f "$file" ] || selections+=("${file#runs/}=$file")
    done
  done
  run python plot_magnitudes.py --figure 4 --stats "${stats[@]}" --selection $(chosen) "${selections[@]}" \
    --out "$DIR/figures"
  figure similarity d --selection $(chosen)
  figure massive --model "$PRESET" --calib-data "$CORPUS" "${CALIB[@]}" --windows "$SHOWN"
}

# Section 4.4. The shapes are LLaMA-2-7B's on a GPU, smaller on a CPU.
overhead() {
  patches
  run python -m utils.paper.overhead --model "$PRESET" --patch "$DIR/n$ABLATED/patch_hadamard.safetensors" \
    --out "$DIR/overhead.json"
}

storage() { overhead; }

# ---------------------------------------------------------------------------------------------------------------------
main() {
  DRY_RUN='' ALL='' TOLD='' COMMANDS=$'\n' NARROW=''
  if [ "${1:-}" = --dry-run ]; then DRY_RUN=yes; shift; fi
  case "${1:-}" in
    "") usage; [ -z "$DRY_RUN" ] || exit 2; return ;;
    -h | --help) usage; return ;;
    test) shift; setup; exec python -m pytest -q "$@" ;;
    -*) echo "error: $1 is no option; see 'bash run_all.sh'" >&2; exit 2 ;;
  esac
  PRESET=$1; shift
  # What the user named from another folder; runs/NAME without characters that a shell or a report would trip over.
  [ ! -e "$CALLER/$PRESET" ] || PRESET=$(realpath "$CALLER/$PRESET")
  [ -z "${LINEARPATCH_DATA:-}" ] || [ ! -e "$CALLER/$LINEARPATCH_DATA" ] || {
    LINEARPATCH_DATA=$(realpath "$CALLER/$LINEARPATCH_DATA"); export LINEARPATCH_DATA; }
  DIR=$(basename "$PRESET" .gguf)
  DIR="runs/${DIR//[^A-Za-z0-9._-]/_}"
  [[ " ${SIZE:-} " == "  " || "$SIZE" = small ]] || {
    echo "error: SIZE=$SIZE; the only other size is small" >&2; exit 2; }
  for target in "$@"; do
    [[ "$target" != *" "* && " $(echo $TARGETS) all " == *" $target "* ]] || {
      echo "error: $target is no target; there are: $(echo $TARGETS) all" >&2; exit 2; }
    [ "$target" != all ] || ALL=yes
  done
  [ $# -gt 0 ] && [ -z "$ALL" ] || set -- $TARGETS
  sizes "$PRESET"
  for target in "$@"; do "$target"; done
  evaluate
  run python -m utils.paper.report "$DIR"
  if [ -n "$DRY_RUN" ]; then
    sed -n 's/^python/+ &/p' <<< "$COMMANDS"
  else
    setup
    python -m utils.paper.reproduce <<< "$COMMANDS"
  fi
}

main "$@"
