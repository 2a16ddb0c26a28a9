#!/usr/bin/env bash
# The figures of the pages that are measured on a CPU, trainings and their results aside; prints Markdown. Takes hours, on a
# machine that does nothing else. What has run at this commit is not run again: if it stops, start it anew (with other
# models, empty bench/work first).
# SmolLM2 is in it if smollm2/ has `model` and `original` (smollm2/README.md makes them), and a Qwen2.5-Coder if qwen2.5/ has both.
#     pip install -r requirements.txt -r bench/requirements.txt
#     bench/all.sh > experiments/results/cpu.md
set -uo pipefail
cd "$(dirname "$0")/.."
commit=$(git rev-parse --short HEAD)
work=bench/work/$commit  # what each command printed, and answers
mkdir -p "$work"
step() {  # a command that fails does not stop the others
    local file
    file=$work/$(sha1sum <<< "$*" | cut -c 1-12)
    printf '\n## `%s`\n\n' "$*"
    if [ ! -e "$file" ] && ! "$@" > "$file.part" 2> "$work/errors"; then
        cat "$file.part"
        printf '\n(failed)\n\n'
        tail -n 5 "$work/errors"
        return
    fi
    [ -e "$file" ] || mv "$file.part" "$file"
    cat "$file"
}
answers() {  # output, prompts, options
    [ -e "$1" ] || { python -m apps.batch "${@:2}" --tau 1 --rows 16 --max-new 128 > "$1.part" && mv "$1.part" "$1"; }
}
quality() { step python -m bench.quality "$@"; }
speed() { step python -m bench.speed "$@"; }
depth() { step python -m bench.depth "$@"; }

processor=$(grep -m 1 "model name" /proc/cpuinfo | cut -d : -f 2)
python -c "import torch, datetime as d; print(f'# $(nproc) cores of$processor, torch {torch.__version__}, {d.date.today()}, commit $commit')"

echo "# The bundled model"
quality
quality --model toy/sft --tau 1
for rows in 1 32; do
    quality --verify --rows $rows
    quality --verify --rows $rows --temperature 1
done
quality --verify --dtype bfloat16
speed --transformers --limit 32 --rounds 9 --rows 1 8
speed --lossless --temperature 1 --limit 24 --rounds 5 --rows 1 8
speed --block-caches
speed --training --rows 32 --max-new 80

echo "# Random weights in the shape of Qwen2.5-0.5B"
for dtype in float32 bfloat16; do
    speed --widths --shape 0.5B --rounds 9 --dtype $dtype
done
speed --training --shape 0.5B --rows 2 --max-new 256 --rounds 2

real_model() {  # directory, what it was before the training, prompts of each kind
    local model="--model $1 --dtype bfloat16" before="--model $2 --dtype bfloat16" name=$work/${1//\//-}
    for kind in gsm8k ifeval bbh plain; do
        head -n $3 bench/data/$kind/test.jsonl > $work/$kind.jsonl
        quality $model --data $work/$kind.jsonl --max-new 128 --verify --rows 1
    done
    # How far the training moved it: its predictions of what the model before it answered.
    cat $work/{gsm8k,ifeval,bbh,plain}.jsonl > $work/prompts.jsonl
    answers $name-greedy.jsonl $work/prompts.jsonl $before
    answers $name-drawn.jsonl $work/prompts.jsonl $before --temperature 0.7
    for kind in greedy drawn; do
        quality $model --data $name-$kind.jsonl --against $2 --tau 1 --max-new 1
    done
    for each in "$model" "$before"; do  # how many answers repeat themselves
        quality $each --data bench/data/plain/test.jsonl --tau 1 --max-new 192
    done
    local asked="--data bench/data/gsm8k/test.jsonl --max-new 64"
    speed $model $asked --limit 4 --transformers --rows 1 --rounds 9
    speed $model $asked --limit 8 --transformers --rows 8 --rounds 3
    speed $model $asked --limit 4 --lossless --temperature 1 --rows 1
    depth $model --verify
}

if [ -d smollm2/model ] && [ -d smollm2/original ]; then
    echo "# SmolLM2-135M"
    real_model smollm2/model smollm2/original 20
fi
if [ -d qwen2.5/model ] && [ -d qwen2.5/original ]; then
    echo "# Qwen2.5-Coder-0.5B"
    real_model qwen2.5/model qwen2.5/original 10
fi
