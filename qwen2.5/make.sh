#!/usr/bin/env bash
# Train the masks of a Qwen2.5-Coder on its own answers, and measure: answers, training, patch, table.
# Killed at any time, it goes on where it stopped. README.md makes qwen2.5/original; then
#     pip install -r requirements.txt -r bench/requirements.txt
#     qwen2.5/make.sh GSM8K/train.jsonl IFEVAL/input_data.jsonl
# Sizes are variables: these are for a GPU, README.md has some for a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
gsm8k=$1 ifeval=$2
ORIGINAL=${ORIGINAL:-qwen2.5/original}
START=${START:-$ORIGINAL}    # training begins with this model; it holds to the original
WORK=${WORK:-qwen2.5/work}   # for all that is made
ANSWERS=${ANSWERS:-9000}     # greedy ones, which teach masks
DRAWN=${DRAWN:-2500}         # of these questions answered once more, at temperature 1
TOKENS=${TOKENS:-320}        # of an answer
ROWS=${ROWS:-192}            # answered at a time
EPOCHS=${EPOCHS:-2}
BATCH=${BATCH:-16}           # answers in a step
LENGTH=${LENGTH:-512}         # of an example, the rest is cut
LR=${LR:-1.5e-4}
RANK=${RANK:-90}             # directions of each matrix that the patch keeps
PROBLEMS=${PROBLEMS:-400}    # of each benchmark

mkdir -p "$WORK"
once() {  # FILE COMMAND: what the command prints goes to the file, which exists only when complete
    local file=$WORK/$1
    shift
    [ -e "$file" ] && return
    "$@" > "$file.part"
    mv "$file.part" "$file"
}
answer() { python -m apps.batch --model "$ORIGINAL" --tau 1 --rows "$ROWS" --max-new "$TOKENS" --dtype bfloat16 "$@"; }
answer_all() {  # NAME COUNT OPTIONS: in pieces of 500, of which a kill costs one
    local name=$1 count=$2 piece
    shift 2
    head -n "$count" "$WORK/questions.jsonl" | split -l 500 -d -a 3 - "$WORK/questions-$name-"
    for piece in "$WORK/questions-$name-"*; do
        once "$name-${piece##*-}.jsonl" answer "$piece" "$@"
    done
}

once questions.jsonl python qwen2.5/questions.py "$gsm8k" "$ifeval" --count $((ANSWERS + 120))
answer_all own "$ANSWERS"
answer_all drawn "$DRAWN" --temperature 1
data() {
    cat "$WORK"/own-*.jsonl
    sed 's/^{/{"masks": false, /' "$WORK"/drawn-*.jsonl
}
once data.jsonl data
python -m apps.low_rank --model "$START" --original "$ORIGINAL" --data "$WORK/data.jsonl" --out "$WORK/mars" --resume \
    --epochs "$EPOCHS" --batch "$BATCH" --lr "$LR" --max-length "$LENGTH" --save-every 50 --dtype bfloat16
[ -e "$WORK/patch.gz" ] || python -m apps.patch make "$ORIGINAL" "$WORK/mars" "$WORK/patch.gz" --rank "$RANK"
[ -e "$WORK/model/config.json" ] || python -m apps.patch apply "$ORIGINAL" "$WORK/patch.gz" "$WORK/model"

# What the patch gives: right answers and tokens per forward, speed, what sure masks get wrong.
problems() {
    head -n "$PROBLEMS" bench/data/gsm8k/test.jsonl | PYTHONPATH=qwen2.5 python -c "
import json, sys
from questions import BRIEF
for row in map(json.loads, sys.stdin):
    messages = [{'role': 'system', 'content': BRIEF}, {'role': 'user', 'content': row['question']}]
    print(json.dumps({'messages': messages, 'answer': row['answer']}))"
}
limit=$((PROBLEMS < 100 ? PROBLEMS : 100))
harness() {
    python -m bench.lm_harness --tasks humaneval_bundled ifeval_bundled --run-code --limit $limit \
        --rows "$ROWS" --max-new 320 --dtype bfloat16 "$@"
}
quality() { python -m bench.quality --dtype bfloat16 --rows "$ROWS" "$@"; }
speed() {
    python -m bench.speed --transformers --model "$WORK/model" --data "$1" --dtype bfloat16 \
        --rows 1 --limit $((PROBLEMS < 10 ? PROBLEMS : 10)) --max-new 160 --rounds 3
}
unseen() { tail -n 120 "$WORK/questions.jsonl" > "$WORK/unseen-questions"; answer "$WORK/unseen-questions"; }
once gsm8k.jsonl problems
once unseen.jsonl unseen
model="--model $WORK/model"
once table-1.md harness --model "$ORIGINAL" --tau 1
once table-2.md harness $model --tau 1 .99 .95 .9 .8
once table-3.md harness $model
once table-4.md quality $model --data "$WORK/gsm8k.jsonl" --max-new 400 --against "$ORIGINAL" --tau .99 .95 .9 .8
once table-5.md quality $model --data "$WORK/gsm8k.jsonl" --max-new 400
once table-6.md quality $model --data "$WORK/unseen.jsonl" --max-new 1 --against "$ORIGINAL" --tau 1
once table-7.md speed bench/data/human_eval/test.jsonl
cat "$WORK"/table-*.md
