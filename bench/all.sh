#!/usr/bin/env bash
# The figures of the pages that are measured on a CPU, trainings and their results aside; prints
# Markdown. Takes hours, on a machine that does nothing else. A command that fails does not stop the
# others. SmolLM2 and Qwen2.5 are in it where they were unpacked, each with its original: smollm2/
# and smollm2-original/, qwen2.5/ and qwen2.5-original/ (see patches/).
#     pip install -r requirements.txt -r bench/requirements.txt
#     bench/all.sh > cpu.md
# LLAMA may have the addresses of two servers of llama.cpp with Qwen2.5 (docs/speed.md starts them).
set -uo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
step() {
    printf '\n## `%s`\n\n' "$*"
    "$@" 2> "$work/errors" || { printf '\n(failed)\n\n'; tail -n 5 "$work/errors"; }
}
quality() { step python -m bench.quality "$@"; }
speed() { step python -m bench.speed "$@"; }

processor=$(grep -m 1 "model name" /proc/cpuinfo | cut -d : -f 2)
python -c "import torch, datetime as d; print(f'# $(nproc) cores of$processor, torch {torch.__version__}, {d.date.today()}, commit $(git rev-parse --short HEAD)')"

echo "# The bundled model"
quality --tau 1 .95 .9 .8 .7 .6 .5
quality --model toy/sft --tau 1
for rows in 1 32; do
    quality --rows $rows
    quality --rows $rows --temperature 1
done
quality --dtype bfloat16
speed --transformers --limit 32 --rounds 9 --rows 1 8
speed --temperature 1 --limit 24 --rows 1 8
speed --block-caches --limit 50 --rounds 3 --rows 1 8

echo "# Random weights in the shape of Qwen2.5-0.5B"
for dtype in float32 bfloat16; do
    speed --widths --shape 0.5B --rounds 9 --dtype $dtype
done

for name in smollm2 qwen2.5; do
    [ -d $name ] && [ -d $name-original ] || continue
    echo "# $name"
    model="--model $name --dtype bfloat16"
    before="--model $name-original --dtype bfloat16"
    for kind in gsm8k ifeval bbh plain code; do
        quality $model --data bench/data/$kind/test.jsonl --limit 20 --max-new 128 --rows 1
    done
    # How far the training moved it: its predictions of what the model before it answered.
    for kind in gsm8k ifeval bbh plain; do head -n 20 bench/data/$kind/test.jsonl; done > "$work/prompts.jsonl"
    for temperature in 0 0.7; do
        python -m apps.batch "$work/prompts.jsonl" $before --tau 1 --rows 16 --max-new 128 --temperature $temperature > "$work/answers.jsonl"
        quality $model --data "$work/answers.jsonl" --against $name-original --tau 1 --max-new 1
    done
    gsm8k="--data bench/data/gsm8k/test.jsonl --max-new 64"
    speed $model $gsm8k --limit 4 --transformers --rows 1 --rounds 9
    servers=
    [ $name = qwen2.5 ] && servers=${LLAMA:+--llama-cpp $LLAMA}
    for kind in change fix explain complete; do
        grep "\"kind\": \"$kind\"" bench/data/code/test.jsonl > "$work/$kind.jsonl"
        speed $model --data "$work/$kind.jsonl" --max-new 128 --rounds 1 $servers
    done
    speed $model --data bench/data/gsm8k/test.jsonl --limit 12 --max-new 128 --rounds 1 $servers
    speed $model --data bench/data/plain/test.jsonl --limit 20 --max-new 128 --rounds 1
    speed $model $gsm8k --limit 8 --transformers --rows 8 --rounds 3
    speed $model $gsm8k --limit 4 --temperature 1 --rows 1
done
